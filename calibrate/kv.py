"""Keys and values of one layer, seen or rounded on their way into attention.

Both classes stand in for transformers' cache: an attention hands over its keys, rotated, and its values, each
[B, KV heads, T, D], and goes on with what it is given back.
"""

import torch
from torch import Tensor

from qtool.core.activation import FP8_MAX
from qtool.core.qtensor import KvScales
from qtool.core.schemes import KvCacheScheme


class KvRanges:
    """Remembers the largest key and value of each KV head."""

    def __init__(self) -> None:
        self._largest: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Called by the attention."""
        found = tuple(part.abs().amax((0, 2, 3)) for part in (keys, values))
        old = self._largest or (torch.zeros(()), torch.zeros(()))
        self._largest = torch.maximum(old[0], found[0]), torch.maximum(old[1], found[1])
        return keys, values

    @property
    def seen(self) -> bool:
        """Whether any attention came by."""
        return self._largest is not None

    def scales(self, scheme: KvCacheScheme) -> KvScales:
        """Scales with which everything seen fits; 1 where that was zero."""
        assert self._largest is not None
        most = FP8_MAX if scheme.kind == "fp8" else 127.0

        def scale(largest: Tensor) -> Tensor:
            shared = largest if scheme.per_head else largest.amax(0, keepdim=True)
            return torch.where(shared == 0, 1.0, shared / most)

        return KvScales(scale(self._largest[0]), scale(self._largest[1]))


class KvRounding:
    """Rounds keys and values to what a quantized cache would hold."""

    def __init__(self, scheme: KvCacheScheme, scales: KvScales) -> None:
        self._scheme, self._scales = scheme, scales

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Called by the attention."""
        return self._round(keys, self._scales.key), self._round(values, self._scales.value)

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        scale = scale.view(-1, 1, 1).to(x.device)
        if self._scheme.kind == "fp8":
            return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale
        return (x / scale).round().clamp(-128, 127) * scale
