"""The stored tensors of one quantized linear, each checked as it is read."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.core.formats.tensors import Stored
from qtool.errors import QtoolError


@dataclass(frozen=True)
class Parts:
    """Tensors ``module.NAME`` of a checkpoint. Every error is a QtoolError that names the tensor."""

    checkpoint: Stored
    module: str

    def __contains__(self, name: str) -> bool:
        return f"{self.module}.{name}" in self.checkpoint

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of a stored matrix, without reading it."""
        self._check_stored(name)
        shape = self.checkpoint.shape(f"{self.module}.{name}")
        if len(shape) != 2:
            raise self.error(name, f"has shape {shape}, wanted a matrix")
        return shape[0], shape[1]

    def size(self, name: str) -> int:
        """The number of elements of a stored tensor, without reading it."""
        self._check_stored(name)
        return math.prod(self.checkpoint.shape(f"{self.module}.{name}"))

    def read(self, name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
        """A tensor of that dtype and one of the shapes."""
        tensor = self._read(name, shapes)
        if tensor.dtype != dtype:
            raise self.error(name, f"holds {_name(tensor.dtype)}, wanted {_name(dtype)}")
        return tensor

    def scale(self, name: str, *shapes: tuple[int, ...]) -> Tensor:
        """Scales of one of the shapes, finite and not zero, in their stored floating point dtype."""
        tensor = self._read(name, shapes)
        if not tensor.dtype.is_floating_point:
            raise self.error(name, f"holds {_name(tensor.dtype)}, wanted floating point numbers")
        numbers = tensor if tensor.dtype.itemsize > 1 else tensor.float()
        if not bool((numbers.isfinite() & (numbers != 0)).all()):
            raise self.error(name, "has zero or non-finite values; the checkpoint is damaged")
        return tensor

    def error(self, name: str, problem: str) -> QtoolError:
        """An error about the tensor `name`."""
        return QtoolError(f"{self.checkpoint.path}: {self.module}.{name} {problem}")

    def _read(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
        self._check_stored(name)
        tensor = self.checkpoint.tensor(f"{self.module}.{name}")
        if tuple(tensor.shape) not in shapes:
            raise self.error(name, f"has shape {tuple(tensor.shape)}, wanted {shapes[0]}")
        return tensor

    def _check_stored(self, name: str) -> None:
        if name not in self:
            raise self.error(
                name, "is missing, though config.json says that the linear is quantized; fetch it again"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
