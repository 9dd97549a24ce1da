"""The KV pool that the attention kernel reads: heads before slots, in 16 bits or as 8-bit codes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.compile.config import DecoderConfig
from qtool.core.activation import FP8_MAX
from qtool.core.qtensor import KvScales


class FusedPool:
    """Keys and values of every layer, [layers, 2, blocks, Hkv, block_size, D], keys first."""

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScales] | None = None,
    ) -> None:
        """`dtype` is float16 or bfloat16, or int8 or float8_e4m3fn with `scales` of each layer."""
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._entries = torch.zeros(shape, dtype=dtype, device=device)
        self._scales = None
        if scales is not None:
            pairs = [(layer.key, layer.value) for layer in scales]
            each = [torch.stack([side.expand(config.num_kv_heads) for side in pair]) for pair in pairs]
            self._scales = torch.stack(each).to(device, torch.float32)
        # torch moves no float8 by index
        self._stored = self._entries.view(torch.uint8) if dtype.itemsize == 1 else self._entries

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [blocks, Hkv, block_size, D]."""
        return self._entries[layer, 0], self._entries[layer, 1]

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """What the codes of a layer's keys, and of its values, are multiplied by: [Hkv], or None."""
        return (None, None) if self._scales is None else (self._scales[layer, 0], self._scales[layer, 1])

    def rounded(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values [T, Hkv, D] of a layer as the numbers that the pool will give back.

        What is attended to is then the same whether it came in this step or before.
        """
        if self._scales is None:
            return keys, values
        scales = self._scales[layer]
        codes = self._encode(torch.stack((keys, values)), scales).float()
        new_keys, new_values = (codes * scales[:, None, :, None]).to(keys.dtype)
        return new_keys, new_values

    def write(self, entries: Tensor, slots: Tensor) -> None:
        """Put `entries` [2 · layers, T, Hkv, D], each layer's keys before its values, into `slots` [T]."""
        layers, block_size = len(self._entries), self._entries.shape[4]
        new = self._encode(entries.view(layers, 2, *entries.shape[1:]), self._scales)
        block, offset = slots // block_size, slots % block_size
        self._stored[:, :, block, :, offset] = new.view(self._stored.dtype).permute(2, 0, 1, 3, 4)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer."""
        self._stored[:, :, target] = self._stored[:, :, source]

    def move_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values from slots `sources` to `targets`, every layer, as if all were read first."""
        block_size = self._stored.shape[4]
        (block, offset), (to, at) = (
            (slots // block_size, slots % block_size) for slots in (sources, targets)
        )
        self._stored[:, :, to, :, at] = self._stored[:, :, block, :, offset]

    def _encode(self, entries: Tensor, scales: Tensor | None) -> Tensor:
        """`entries` [.., T, Hkv, D] as the pool stores them, with `scales` [.., Hkv]."""
        dtype = self._entries.dtype
        if scales is None:
            return entries.to(dtype)
        codes = entries / scales[..., None, :, None]
        if dtype == torch.int8:
            return codes.round().clamp(-128, 127).to(dtype)
        return codes.clamp(-FP8_MAX, FP8_MAX).to(dtype)
