"""Quantized activations: what a linear's inputs are rounded to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.core.fp4 import FP4_MAX, fp4_codes, fp4_values
from qtool.core.schemes import ActivationScheme

FP8_MAX = 448.0
"""The largest number of float8_e4m3fn."""

LEAST_BLOCK = 0.125
"""What a block's scale becomes that float8_e4m3fn rounds to zero."""


@dataclass(frozen=True)
class Activation:
    """How one linear rounds its inputs. `scale` is of static schemes, and of nvfp4: its global scale.

    Numbers, not tensors, so that linears over one input can be told to round it alike.
    """

    scheme: ActivationScheme
    scale: float | None = None
    zero_point: int = 0

    def fake_quantize(self, x: Tensor) -> Tensor:
        """The inputs [T, K] as the rounded ones that stand for them, in their own dtype.

        As compressed-tensors does: divided by the scale, moved by the zero point, clamped, rounded half to
        even.
        """
        size = self.scheme.group_size
        if size is not None:
            return self._round(x.view(*x.shape[:-1], -1, size)).view_as(x)
        return self._round(x)

    def _round(self, x: Tensor) -> Tensor:
        if self.scheme.kind == "nvfp4":
            return self._round_nvfp4(x)
        scale, zero_point = self._range(x)
        codes = x / scale + zero_point
        if self.scheme.kind == "fp8":
            codes = codes.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)
        else:
            codes = codes.clamp(-128, 127).round()
        return (codes - zero_point) * scale

    def _round_nvfp4(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        factor = torch.tensor(1 / self.scale)  # divided by what the file stores, as compressed-tensors does
        largest = x.float().abs().amax(-1, keepdim=True)
        block = (factor * (largest / FP4_MAX)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
        scale = torch.where(block == 0, LEAST_BLOCK, block) / factor
        return (fp4_values(fp4_codes(x.float() / scale)) * scale).to(x.dtype)

    def _range(self, x: Tensor) -> tuple[Tensor | float, Tensor | int]:
        if self.scale is not None:
            return self.scale, self.zero_point
        if self.scheme.symmetric:
            steps = 2 * FP8_MAX if self.scheme.kind == "fp8" else 255.0
            return _positive(x.abs().amax(-1, keepdim=True) / (steps / 2)), 0
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255.0
        zero_point = (-128 - low / scale).nan_to_num(nan=-128.0).clamp(-128, 127).round()
        return _positive(scale), zero_point


def _positive(scale: Tensor) -> Tensor:
    """A token of zeros has no range: any scale gives zeros back."""
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
