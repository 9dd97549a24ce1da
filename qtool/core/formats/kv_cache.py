"""The calibrated scales of a quantized KV cache: a number a layer, or a number a KV head."""

from dataclasses import dataclass

from torch import Tensor

from qtool.core.formats.parts import Parts
from qtool.core.formats.tensors import Stored
from qtool.core.qtensor import KvScales
from qtool.core.schemes import KvCacheScheme


@dataclass(frozen=True)
class KvLayout:
    """How keys and values are to be stored between steps, and where a format keeps their scales."""

    scheme: KvCacheScheme
    key: str = "k_scale"
    value: str = "v_scale"
    """Names inside of an attention."""

    def read(self, checkpoint: Stored, attention: str) -> KvScales:
        """The scales of one attention, such as ``model.layers.0.self_attn``."""
        parts = Parts(checkpoint, attention)
        return KvScales(self._scale(parts, self.key), self._scale(parts, self.value))

    def _scale(self, parts: Parts, name: str) -> Tensor:
        heads = parts.size(name) if self.scheme.per_head else 1
        return (
            parts.scale(name, (heads,), (heads, 1, 1), *([()] if heads == 1 else [])).float().reshape(heads)
        )

    def store(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """The tensors that hold the scales of one attention: [1], or [KV heads, 1, 1] as they broadcast."""
        shape = (-1, 1, 1) if self.scheme.per_head else (1,)
        return {
            f"{attention}.{self.key}": scales.key.reshape(shape),
            f"{attention}.{self.value}": scales.value.reshape(shape),
        }
