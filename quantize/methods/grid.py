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
        codes = self._codes(weight).view(weight.shape)
        return QuantizedTensor(codes.to(torch.int8), self.scale, self.zero_point, self.scheme)

    def fake_quantize(self, weight: Tensor) -> Tensor:
        """The point of the grid nearest to each of a weight [N, K], in float32."""
        scale, zero_point = self._parts()
        return ((self._codes(weight) - zero_point) * scale).view(weight.shape)

    def _codes(self, weight: Tensor) -> Tensor:
        """Codes [N, G, K // G] as float32 for a weight [N, K]."""
        scale, zero_point = self._parts()
        codes = (grouped(weight, self.scheme) / scale).round_().add_(zero_point)
        return codes.clamp_(self.scheme.low, self.scheme.high)

    def _parts(self) -> tuple[Tensor, Tensor]:
        zero_point = torch.zeros(()) if self.zero_point is None else self.zero_point[..., None].float()
        return self.scale[..., None].float(), zero_point


def grouped(weight: Tensor, scheme: IntScheme) -> Tensor:
    """A weight [N, K] as its groups [N, G, K // G]."""
    out_features, in_features = weight.shape
    return weight.reshape(out_features, scheme.num_groups(in_features), -1)


def fit_grid(weight: Tensor, scheme: IntScheme, dtype: torch.dtype, ratio: Tensor | float = 1.0) -> Grid:
    """The grid that spans the range of each group of a weight [N, K], shrunk by `ratio` ([N, G] or one).

    Asymmetric ranges are widened to hold zero, which every grid represents exactly. A group of zeros gets
    scale 1; other scales stay between the least and the largest positive number of `dtype`.
    """
    values = grouped(weight, scheme)
    steps = scheme.high - scheme.low
    if scheme.symmetric:
        span = 2 * values.abs().amax(-1) * ratio
        return Grid(stored_scale(span / steps, dtype), None, scheme)
    low = values.amin(-1).clamp(max=0) * ratio
    high = values.amax(-1).clamp(min=0) * ratio
    scale = stored_scale((high - low) / steps, dtype)
    zero_point = (scheme.low - low / scale.float()).round().clamp(scheme.low, scheme.high)
    return Grid(scale, zero_point.to(torch.int8), scheme)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` holds them: 1 where they are zero, else between its least and largest numbers."""
    limits = torch.finfo(dtype)
    least = limits.smallest_normal * limits.eps
    return torch.where(scale == 0, 1.0, scale.clamp(least, limits.max)).to(dtype)
