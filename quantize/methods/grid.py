"""The grid that a weight is rounded to: scales and zero points from ranges, codes from both.

A scale is rounded to the dtype that the checkpoint stores it in before any code is chosen, so that what is
written is what was optimised.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.core.qtensor import QuantizedTensor
from qtool.core.schemes import IntScheme


@dataclass(frozen=True)
class Grid:
    """scale [N, G] in its stored dtype, zero_point [N, G] int8 or None when symmetric."""

    scale: Tensor
    zero_point: Tensor | None
    scheme: IntScheme

    def quantize(self, weight: Tensor) -> QuantizedTensor:
        """Round a weight [N, K] to the nearest point of the grid."""
        codes = self._codes(grouped(weight, self.scheme)).view(weight.shape)
        return QuantizedTensor(codes.to(torch.int8), self.scale, self.zero_point, self.scheme)

    def error(self, values: Tensor) -> Tensor:
        """What rounding groups [N, G, K // G] to the nearest point of the grid adds to them, in float32."""
        scale, zero_point = self._parts()
        return self._codes(values).sub_(zero_point).mul_(scale).sub_(values)

    def _codes(self, values: Tensor) -> Tensor:
        """Codes of groups [N, G, K // G], as float32."""
        scale, zero_point = self._parts()
        return (values / scale).round_().add_(zero_point).clamp_(self.scheme.low, self.scheme.high)

    def _parts(self) -> tuple[Tensor, Tensor]:
        zero_point = torch.zeros(()) if self.zero_point is None else self.zero_point[..., None].float()
        return self.scale[..., None].float(), zero_point


def grouped(weight: Tensor, scheme: IntScheme) -> Tensor:
    """A weight [N, K] as its groups [N, G, K // G]."""
    out_features, in_features = weight.shape
    return weight.reshape(out_features, scheme.num_groups(in_features), -1)


def fit_grid(weight: Tensor, scheme: IntScheme, dtype: torch.dtype, ratio: Tensor | float = 1.0) -> Grid:
    """The grid that spans the range of each group of a weight [N, K], shrunk by `ratio` ([N, G] or one)."""
    return spanning(extremes(grouped(weight, scheme), scheme), scheme, dtype, ratio)


def extremes(values: Tensor, scheme: IntScheme) -> tuple[Tensor, Tensor]:
    """The range [N, G] each of groups [N, G, K // G]: from where and to where.

    Asymmetric ranges are widened to hold zero, which every grid represents exactly.
    """
    if scheme.symmetric:
        largest = values.abs().amax(-1)
        return -largest, largest
    return values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)


def spanning(
    ends: tuple[Tensor, Tensor], scheme: IntScheme, dtype: torch.dtype, ratio: Tensor | float
) -> Grid:
    """The grid that spans the ranges between `ends`, shrunk by `ratio` ([N, G] or one).

    A range of zero width gets scale 1; other scales stay between the least and the largest positive number of
    `dtype`.
    """
    low, high = (end * ratio for end in ends)
    scale = stored_scale((high - low) / (scheme.high - scheme.low), dtype)
    if scheme.symmetric:
        return Grid(scale, None, scheme)
    zero_point = (scheme.low - low / scale.float()).round().clamp(scheme.low, scheme.high)
    return Grid(scale, zero_point.to(torch.int8), scheme)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` holds them: 1 where they are zero, else between its least and largest numbers."""
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps
    return torch.where(scale == 0, 1.0, scale.clamp(least, limits.max)).to(dtype)
