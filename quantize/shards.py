"""Write weights of any size as they come: a shard leaves memory when it is full."""

import json
from functools import partial
from pathlib import Path

from torch import Tensor

from qtool.core.checkpoint import INDEX, SINGLE
from qtool.quantize.writing import PYTORCH, LazyTensor, write_safetensors


class Shards:
    """Safetensors shards in `folder` of about `shard_bytes`, and in the end their index."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._size, self._total = 0, 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors that belong together; what came before is written first if they would not fit."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._size + size > self._limit:
            self._write()
        self._waiting |= tensors
        self._size += size

    def finish(self) -> None:
        """Write what waits, and give the shards the names that tell how many there are."""
        self._write()
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names, 1):
            name = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        self._names.append(list(self._waiting))
        tensors = [
            LazyTensor(name, tensor.dtype, tuple(tensor.shape), partial(self._waiting.__getitem__, name))
            for name, tensor in self._waiting.items()
        ]
        write_safetensors(self._path(len(self._names)), tensors, PYTORCH)
        self._total += self._size
        self._waiting, self._size = {}, 0

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05}.writing"
