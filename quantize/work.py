"""The folder ``OUTPUT.partial`` beside an output, where finished layers wait until all are done."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from qtool.calibrate.layers import Weights
from qtool.calibrate.skeleton import PREFIX
from qtool.core.activation import Activation
from qtool.core.checkpoint import COMPANIONS, INDEX, SINGLE
from qtool.core.files import refuse_existing, rename_new, resumable, write_text
from qtool.core.formats.compressed_tensors import decode
from qtool.core.formats.kv_cache import KvLayout
from qtool.core.kept import begun, clear, drop, has_kept, is_whole, keep
from qtool.core.manifest import MANIFEST, LinearRecord
from qtool.core.qtensor import KvScales
from qtool.errors import UsageError
from qtool.quantize.layer import QuantizedLayer
from qtool.quantize.plan import Assignment
from qtool.quantize.writing import PYTORCH, LazyTensor, write_safetensors

_log = logging.getLogger(__name__)

_RECORDS = "linears"
ALLOCATION = "allocation.json"
_CHECKPOINT_FILES = {SINGLE, INDEX, MANIFEST, "config.json", *COMPANIONS}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def attention_of(index: int) -> str:
    """The module that holds the scales of a layer's keys and values."""
    return f"{PREFIX}.{index}.self_attn"


@contextmanager
def work_folder(output: Path, decides: Mapping[str, object], num_parts: int) -> Iterator["WorkFolder"]:
    """Begin the work on `output`, or take it up again, for this process alone, see `kept.begun`.

    `num_parts` are the layers, and the head where that is quantized. Raises UsageError when `output` exists,
    too, and QtoolError when the disk refuses. The folder stays when the block fails, and goes with
    `WorkFolder.finish`.
    """
    refuse_existing(output)
    path = output.absolute().with_name(f"{output.name}.partial")
    with resumable(path), begun(path, decides):
        work = WorkFolder(path, output, num_parts)
        work.refuse_foreign()
        work.drop_damaged()
        yield work


class WorkFolder:
    """Finished layers, one safetensors file each, whole or absent, in the folder `path`."""

    def __init__(self, path: Path, output: Path, num_parts: int) -> None:
        self.path = path
        self._output = output
        self._checkpoint = path / "checkpoint"
        self._parts = [self.part(index) for index in range(num_parts)]

    def part(self, index: int) -> Path:
        """The file of a finished layer: a shard that a checkpoint can take as it is."""
        return self.path / f"layer-{index:05}.safetensors"

    def has(self, index: int) -> bool:
        """Whether layer `index` is finished."""
        return self.part(index).exists()

    def save(self, index: int, layer: QuantizedLayer) -> None:
        """Keep a finished layer."""
        records = {name: record.model_dump() for name, record in layer.records.items()}
        tensors = [lazy(name, layer.tensors.__getitem__) for name in layer.tensors]
        temporary = self.path / "layer.writing"
        write_safetensors(temporary, tensors, PYTORCH | {_RECORDS: json.dumps(records)})
        keep(temporary, self.part(index))

    def drop_damaged(self) -> None:
        """Remove a finished layer whose bytes are not those that were written, and all behind it: they were
        quantized for what it made."""
        parts = [part for part in self._parts if part.exists()]
        damaged = parts[len(list(takewhile(is_whole, parts))) :]
        if damaged:
            _log.warning("%s: is damaged; it and what follows it are quantized again", damaged[0])
        for part in damaged:
            drop(part)

    def records(self, index: int) -> dict[str, LinearRecord]:
        """What was done to the linears of a finished layer, by full name."""
        records = json.loads(self._open(index).metadata()[_RECORDS])
        return {name: LinearRecord(**record) for name, record in records.items()}

    def weights(self, index: int, assigned: Mapping[str, Assignment]) -> Weights:
        """The weights of a finished layer as an engine will see them."""
        part = self._open(index)

        def read(name: str) -> Tensor:
            module = name.removesuffix(".weight")
            if module in assigned:
                return decode(module, assigned[module].computes_with, part.get_tensor).dense()
            tensor: Tensor = part.get_tensor(name)
            return tensor

        return read

    def activations(self, index: int, assigned: Mapping[str, Assignment]) -> dict[str, Activation]:
        """How the linears of a finished layer round their inputs, where they do."""
        get_tensor = self._open(index).get_tensor
        linears = {
            module: decode(module, assigned[module].computes_with, get_tensor)
            for module in self.records(index)
            if assigned[module].activation is not None
        }
        return {module: one.activation for module, one in linears.items() if one.activation is not None}

    def kv_scales(self, index: int, layout: KvLayout) -> KvScales:
        """The scales of a finished layer's keys and values."""
        part, attention = self._open(index), attention_of(index)
        return KvScales(
            *(part.get_tensor(f"{attention}.{name}").flatten() for name in (layout.key, layout.value))
        )

    def once(self, name: str, make: Callable[[], str]) -> str:
        """A text that is made the first time, and read when the work is taken up again."""
        file = self.path / name
        if not has_kept(file):
            temporary = file.with_suffix(".writing")
            write_text(temporary, make())
            keep(temporary, file)
        return file.read_text(encoding="utf-8")

    def tensors(self, index: int) -> list[LazyTensor]:
        """The stored tensors of a finished layer."""

        def read(name: str) -> Tensor:
            with self._open(index) as part:  # anew, so that what was read leaves memory
                tensor: Tensor = part.get_tensor(name)
            return tensor

        with self._open(index) as part:
            names = sorted(part.keys())
        return [lazy(name, read) for name in names]

    def _open(self, index: int) -> Any:
        return safe_open(self.part(index), framework="pt")

    def new_checkpoint(self) -> Path:
        """An empty folder for the whole checkpoint."""
        self.refuse_foreign()
        shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._checkpoint.mkdir()
        return self._checkpoint

    def refuse_foreign(self) -> None:
        """Raise UsageError for what no run wrote where the checkpoint of a killed one is to make way."""
        if not self._checkpoint.exists() and not self._checkpoint.is_symlink():
            return
        own = self._checkpoint.is_dir() and not self._checkpoint.is_symlink()
        inside = sorted(self._checkpoint.iterdir()) if own else [self._checkpoint]
        foreign = next((path for path in inside if not _of_checkpoint(path)), None)
        if foreign is not None:
            raise UsageError(
                f"{foreign}: is in the way of what this run writes, and no run wrote it; move it away, then "
                "give the same command"
            )

    def finish(self, checkpoint: Path) -> None:
        """Rename the whole checkpoint to the output, and clean up."""
        rename_new(checkpoint, self._output)
        clear(self.path, [*self._parts, self.path / ALLOCATION])


def _of_checkpoint(path: Path) -> bool:
    """Whether a run may have written that into the checkpoint."""
    return path.is_file() and (path.name in _CHECKPOINT_FILES or bool(_SHARD.fullmatch(path.name)))


def lazy(name: str, get_tensor: Callable[[str], Tensor]) -> LazyTensor:
    """A stored tensor, whose header is read now and whose numbers later."""
    tensor = get_tensor(name)
    return LazyTensor(name, tensor.dtype, tuple(tensor.shape), lambda: get_tensor(name))
