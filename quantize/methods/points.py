"""The points that the numbers of a weight can be rounded to, for methods that round column by column.

A point is a step times a number of the format: an integer less its zero point, or a small float. Steps are
those of a weight that was rounded before, and stay.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from qtool.core.activation import FP8_MAX
from qtool.core.fp4 import fp4_codes, fp4_values
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Quantized, QuantizedTensor
from qtool.quantize.methods.grid import grouped


class Points(Protocol):
    """The grid of one weight [N, K]."""

    steps: Tensor
    """[G, N] float32: a row for each group of columns."""
    columns: int
    """Columns of a group; the last may have fewer."""

    def nearest_(self, numbers: Tensor, group: int) -> Tensor:
        """Replace numbers [N] of a column, in steps of its group, by the nearest of the format."""

    def numbers(self) -> Tensor:
        """What the weight was rounded to, in steps: float32 [N, K]."""

    def tensor(self, numbers: Tensor) -> Quantized:
        """The weight that has these numbers [N, K] of the format."""


def points_of(quantized: Quantized) -> Points:
    """The points of the grid that a rounded weight has."""
    match quantized:
        case QuantizedTensor():
            return _Integers(quantized)
        case Fp8Tensor():
            return _Fp8(quantized)
        case Fp4Tensor():
            return _Fp4(quantized)


class _Integers:
    def __init__(self, quantized: QuantizedTensor) -> None:
        self._quantized, self._scheme = quantized, quantized.scheme
        self.steps = quantized.scale.float().T.contiguous()
        self.columns = quantized.shape[1] // len(self.steps)
        zeros = torch.zeros_like(quantized.scale) if quantized.zero_point is None else quantized.zero_point
        self._zeros = zeros.float()
        self._by_group = self._zeros.T.contiguous().unbind()

    def nearest_(self, numbers: Tensor, group: int) -> Tensor:
        zero = self._by_group[group]
        return numbers.round_().add_(zero).clamp_(self._scheme.low, self._scheme.high).sub_(zero)

    def numbers(self) -> Tensor:
        return self._shifted(self._quantized.codes.float(), -1)

    def tensor(self, numbers: Tensor) -> QuantizedTensor:
        return replace(self._quantized, codes=self._shifted(numbers, 1).to(torch.int8))

    def _shifted(self, values: Tensor, sign: int) -> Tensor:
        return (grouped(values, self._scheme) + sign * self._zeros[..., None]).flatten(1)


class _Fp8:
    def __init__(self, quantized: Fp8Tensor) -> None:
        self._quantized = quantized
        self.steps = quantized.by_row().scale.float().T.contiguous()
        self.columns = quantized.scheme.columns or quantized.shape[1]

    def nearest_(self, numbers: Tensor, group: int) -> Tensor:
        return numbers.copy_(numbers.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn))

    def numbers(self) -> Tensor:
        return self._quantized.codes.float()

    def tensor(self, numbers: Tensor) -> Fp8Tensor:
        return replace(self._quantized, codes=numbers.to(torch.float8_e4m3fn))


class _Fp4:
    def __init__(self, quantized: Fp4Tensor) -> None:
        self._quantized = quantized
        self.steps = quantized.scales().T.contiguous()
        self.columns = quantized.scheme.group_size

    def nearest_(self, numbers: Tensor, group: int) -> Tensor:
        return numbers.copy_(fp4_values(fp4_codes(numbers)))

    def numbers(self) -> Tensor:
        return self._quantized.values()

    def tensor(self, numbers: Tensor) -> Fp4Tensor:
        return replace(self._quantized, codes=fp4_codes(numbers.contiguous()))
