"""Write safetensors files of any size one tensor at a time."""

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from qtool.calibrate.finite import is_finite
from qtool.core.checkpoint import INDEX, SINGLE
from qtool.errors import QtoolError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}

PYTORCH = {"format": "pt"}
"""What transformers wants to read in a weights file."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written, read only when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Sequence[LazyTensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file at `path`, in one pass, holding one tensor in memory at a time.

    Wide dtypes come first, so that every tensor lies aligned; names decide after that, so the same tensors
    give the same bytes. Raises QtoolError for one that holds NaN or infinities, see `_finite`.
    """
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            file.write(_finite(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _finite(tensor: LazyTensor) -> Tensor:
    """What a tensor holds. Floats of 16 bits and more are looked at; those of 8 are codes and their scales,
    which quantizers make."""
    value = tensor.read()
    if value.is_floating_point() and value.itemsize > 1 and not is_finite(value):
        raise QtoolError(
            f"{tensor.name}: holds NaN or infinite numbers; fetch the checkpoint that it comes from, or make "
            "it, again"
        )
    return value


def write_weights(
    folder: Path,
    tensors: Sequence[LazyTensor],
    shard_bytes: int,
    finished: Mapping[Path, Sequence[LazyTensor]] = MappingProxyType({}),
) -> None:
    """Write a model's weights into `folder`: one file, or shards of at most `shard_bytes` with their index.

    A tensor larger than that gets a shard of its own. `finished` are files that hold further tensors: where
    there are shards, each becomes one as it is, by a link, so that nothing is written twice.
    """
    everything = [*tensors, *chain.from_iterable(finished.values())]
    if len(next(_shards(everything, shard_bytes))) == len(everything):
        write_safetensors(folder / SINGLE, everything, PYTORCH)
        return
    shards: list[tuple[Path | None, Sequence[LazyTensor]]] = [
        *((None, shard) for shard in _shards(tensors, shard_bytes) if shard),
        *finished.items(),
    ]
    weight_map: dict[str, str] = {}
    for number, (file, shard) in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if file is None:
            write_safetensors(folder / name, shard, PYTORCH)
        else:
            _link(file, folder / name)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.size for tensor in everything)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _link(file: Path, name: Path) -> None:
    """Give a file a further name, or copy it where the file system knows one name a file."""
    try:
        name.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, name)


def _shards(tensors: Sequence[LazyTensor], shard_bytes: int) -> Iterator[list[LazyTensor]]:
    shard: list[LazyTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.size
    yield shard
