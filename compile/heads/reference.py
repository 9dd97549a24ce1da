"""EAGLE's operations in torch: over a paged pool to draft with, over whole sequences to train with."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from qtool.compile.backends.reference import Batch, Dense, Pool, Reference, Tokens
from qtool.compile.decoder import Attention


class DraftReference(Reference):
    """The reference backend's operations, and features beside the tokens."""

    def __init__(self, batch: Batch, pool: Pool, features: Tensor) -> None:
        """`features` [T, hidden]."""
        super().__init__(batch, pool)
        self._features = features

    def features(self, width: int) -> Tensor:
        return self._features

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a, b), dim=-1)


@dataclass
class Unrolled:
    """Keys and values of every drafted token so far, each [B, H, S, D], the target's features' first."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class DraftTraining(Dense):
    """Whole sequences [B, S] at once, in the d-th step of drafts that begin together, one at every row.

    The training-time test of EAGLE-3 (section 3.2): in step 0 every row has the target's feature, and sees
    the rows before it. In step d row i drafts what follows its own d drafts: it sees what step 0 saw, then
    its own d drafts, and no other row's.
    """

    def __init__(self, tokens: Tokens, num_sequences: int, features: Tensor, past: Unrolled) -> None:
        super().__init__(tokens)
        self._num_sequences, self._features, self._past = num_sequences, features, past

    def features(self, width: int) -> Tensor:
        return self._features

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a, b), dim=-1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        queries = self._heads(q, attention.num_heads, attention)
        self._past.keys.append(self._heads(k, attention.num_kv_heads, attention))
        self._past.values.append(self._heads(v, attention.num_kv_heads, attention))
        first, drafted = self._past.keys[0], self._past.keys[1:]
        if not drafted:
            mixed = F.scaled_dot_product_attention(
                queries, first, self._past.values[0], is_causal=True, scale=attention.scale
            )
        else:
            mixed = self._mix(queries, attention.scale)
        return mixed.transpose(1, 2).reshape(len(q), -1)

    def _mix(self, queries: Tensor, scale: float) -> Tensor:
        first, *drafted = self._past.keys
        value, *values = self._past.values
        length = queries.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
        scores = (queries @ first.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
        own = [(queries * keys).sum(-1, keepdim=True) * scale for keys in drafted]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
        mixed = weights[..., :length] @ value
        for place, drafts in enumerate(values, length):
            mixed = mixed + weights[..., place, None] * drafts
        return mixed

    def _heads(self, x: Tensor, count: int, attention: Attention) -> Tensor:
        """[B·S, heads·D] as [B, H, S, D], key heads repeated for the queries that share them."""
        heads = x.view(self._num_sequences, -1, count, attention.head_dim).transpose(1, 2)
        return heads.repeat_interleave(attention.num_heads // count, dim=1)
