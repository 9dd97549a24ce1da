"""The torch backend for GPUs: the reference's operations, with attention in one kernel over the block pool.

Nothing here waits for the GPU but a mixture's choice of experts, which is read back once a layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtool.compile.backends.fused_pool import FusedPool
from qtool.compile.backends.reference import Dense, Tokens, choose_experts
from qtool.compile.decoder import Attention
from qtool.compile.kernels.launch import Batch, paged_attention
from qtool.compile.layers import Mixture
from qtool.compile.rope import Rope


@dataclass(frozen=True)
class FusedTokens(Tokens):
    """The new tokens of a step, and where each finds its past and its place in the pool."""

    batch: Batch
    slots: Tensor
    """[T], of the pool, see `qtool.runtime.engines.contract.slots_of`."""


class Fused(Dense):
    """All operations on one step, in float16 or bfloat16. `commit` belongs to them: call it once, last."""

    def __init__(self, tokens: FusedTokens, pool: FusedPool, frequencies: dict[Rope, Tensor]) -> None:
        """`frequencies` keeps those of each rotary embedding on the device, from step to step."""
        super().__init__(tokens)
        self._step, self._pool, self._frequencies = tokens, pool, frequencies
        self._rotations: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._entries: list[Tensor] = []

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # squares are beyond float16: torch's own norm sums them in float32
        heads = x.view(len(x), x.shape[1] // len(weight), len(weight))
        return F.rms_norm(heads, weight.shape, weight, eps).view_as(x)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        queries, keys, values = (x.view(len(x), -1, attention.head_dim) for x in (q, k, v))
        keys, values = self._pool.rounded(attention.layer, keys, values)
        self._entries += [keys, values]
        key_scales, value_scales = self._pool.scales(attention.layer)
        mixed = paged_attention(
            queries,
            keys,
            values,
            *self._pool.layer(attention.layer),
            self._step.batch,
            scale=attention.scale,
            window=attention.window or 0,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        return mixed.view_as(q)

    def commit(self) -> None:
        """Write the keys and values of all layers to the pool: the kernel only read it."""
        self._pool.write(torch.stack(self._entries), self._step.slots)

    def mixture(
        self, x: Tensor, logits: Tensor, mixture: Mixture, experts: Sequence[Callable[[Tensor], Tensor]]
    ) -> Tensor:
        shares, chosen = choose_experts(logits, mixture)
        owner, order = chosen.flatten().sort(stable=True)
        rows = order // mixture.num_chosen
        ends = torch.searchsorted(owner, torch.arange(len(experts), device=owner.device), right=True)
        bounds = [0, *ends.tolist()]
        parts = [
            expert(x[rows[start:end]])
            for expert, start, end in zip(experts, bounds, bounds[1:], strict=False)
            if start < end
        ]
        weighted = torch.cat(parts) * shares.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add_(0, rows, weighted)

    def _rotation(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if rope not in self._rotations:
            self._rotations[rope] = super()._rotation(rope, dtype)
        return self._rotations[rope]

    def _radians(self, rope: Rope) -> Tensor:
        if rope not in self._frequencies:
            self._frequencies[rope] = super()._radians(rope)
        return self._frequencies[rope]
