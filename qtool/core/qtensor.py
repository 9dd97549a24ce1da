"""The quantized tensor: integer codes with their scales, and the linear layer that holds one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.core.schemes import IntScheme


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [N, K] as integers.

    codes [N, K] int8, scale [N, G] floating point, zero_point [N, G] int8 or None when symmetric;
    all three in the signed range of `scheme`. Nothing is packed here: packing belongs to a format.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: IntScheme

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for, computed in float32."""
        out_features, in_features = self.codes.shape
        groups = self.scale.shape[1]
        codes = self.codes.view(out_features, groups, in_features // groups).float()
        if self.zero_point is not None:
            codes = codes - self.zero_point[..., None].float()
        return (codes * self.scale[..., None].float()).view(out_features, in_features).to(dtype)


@dataclass(frozen=True)
class Linear:
    """A linear layer as a checkpoint holds it: weight [N, K], dense or quantized, and bias [N] or None."""

    weight: Tensor | QuantizedTensor
    bias: Tensor | None

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] as numbers."""
        if isinstance(self.weight, QuantizedTensor):
            return self.weight.dequantize(dtype)
        return self.weight.to(dtype)
