"""Attention with its own products in 8 bits: queries, keys, values and probabilities rounded."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface

from qtool.core.activation import FP8_MAX, Activation
from qtool.core.schemes import ActivationScheme

Kind = Literal["int8", "fp8"]


@contextmanager
def rounded_attention(model: Any, kind: Kind) -> Iterator[None]:
    """Let the attention of `model` round what it multiplies while the block runs its layers.

    Queries, keys and values by the range of each token in each head, and ``exp(score - largest)``, which lies
    in [0, 1], by that range, before the sum that it is divided by is taken: as kernels in 8 bits do.
    """
    name, before = f"qtool_{kind}", model.config._attn_implementation
    AttentionInterface.register(name, _rounding(kind))
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _rounding(kind: Kind) -> Any:
    by_token = Activation(ActivationScheme(kind, dynamic=True))
    by_one = Activation(ActivationScheme(kind, dynamic=False), 1 / (FP8_MAX if kind == "fp8" else 127.0))

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        repeats = query.shape[1] // key.shape[1]
        query = by_token.fake_quantize(query)
        key, value = (by_token.fake_quantize(part).repeat_interleave(repeats, 1) for part in (key, value))
        scores = query @ key.transpose(2, 3) * (scaling or 1 / math.sqrt(query.shape[-1]))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = _masked(scores, attention_mask)
        weights = by_one.fake_quantize((scores - scores.amax(-1, keepdim=True)).exp())
        output = weights @ value / weights.sum(-1, keepdim=True)
        return output.transpose(1, 2).contiguous(), None

    return attend


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """transformers leaves out a mask that only hides what is to come."""
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
