"""A quantized KV cache: what keys and values are rounded to between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.core.activation import FP8_MAX
from qtool.core.qtensor import KvScales
from qtool.core.schemes import KvCacheScheme


@dataclass(frozen=True)
class KvCache:
    """The scheme of a model's cache, and the scales of each layer."""

    scheme: KvCacheScheme
    scales: Sequence[KvScales]

    def fake_quantize(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, Hkv, D] of a layer as the numbers that its cache would give back."""
        scales = self.scales[layer]
        return self._round(keys, scales.key), self._round(values, scales.value)

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        scale = scale.to(x).view(-1, 1)
        if self.scheme.kind == "fp8":
            return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale
        return (x / scale).round().clamp(-128, 127) * scale
