"""Drift of a model from its baseline: perplexity, KL divergence and top-1 agreement, from logits alone."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkDrift:
    """What some positions show, in order of position.

    kl [T], KL(base || other) in nats; same_top1 [T] bool; nll_base and nll_other [P], negative log
    likelihood in nats of the token that follows, for the P <= T positions that a token follows.
    """

    kl: Tensor
    same_top1: Tensor
    nll_base: Tensor
    nll_other: Tensor


def chunk_drift(base: Tensor, other: Tensor, following: Tensor) -> ChunkDrift:
    """Compare the logits [T, V] of two models at the same positions.

    `following` [P] are the tokens that come after the first P positions (P = T, or T - 1 at the end of a
    window). Computed in float32 over log-softmax; tiny negative KL from rounding is clamped to 0.
    """
    log_base = torch.log_softmax(base.float(), dim=-1)
    log_other = torch.log_softmax(other.float(), dim=-1)
    kl = (log_base.exp() * (log_base - log_other)).sum(-1).clamp_min(0.0)
    rows = torch.arange(len(following))
    return ChunkDrift(
        kl=kl,
        same_top1=base.argmax(-1) == other.argmax(-1),
        nll_base=-log_base[rows, following],
        nll_other=-log_other[rows, following],
    )


@dataclass(frozen=True)
class Drift:
    """Drift over all positions of all windows."""

    perplexity_base: float
    perplexity: float
    kl_mean: float
    """Mean KL(base || other), nats a token."""
    kl_p99: float
    """99th percentile of the same over positions."""
    top1_agreement: float
    """Share of positions where both models prefer the same token."""
    positions: int

    @property
    def perplexity_increase(self) -> float:
        """Relative: 0.05 is 5 % above the baseline."""
        return self.perplexity / self.perplexity_base - 1


def total_drift(chunks: Iterable[ChunkDrift]) -> Drift:
    """Put the chunks of all windows together; every position weighs the same."""
    parts = list(chunks)
    kl = torch.cat([part.kl for part in parts]).double()
    return Drift(
        perplexity_base=math.exp(torch.cat([part.nll_base for part in parts]).double().mean().item()),
        perplexity=math.exp(torch.cat([part.nll_other for part in parts]).double().mean().item()),
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        top1_agreement=torch.cat([part.same_top1 for part in parts]).double().mean().item(),
        positions=len(kl),
    )
