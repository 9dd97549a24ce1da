"""Perplexity, KL and top-1 agreement against values worked out another way."""

import math

import pytest
import torch

from qtool.eval.drift import chunk_drift, total_drift


def random_logits(positions: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(positions, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_model_does_not_drift_from_itself() -> None:
    logits = random_logits(7, 13, seed=0)
    drift = total_drift([chunk_drift(logits, logits, torch.arange(6))])
    assert drift.kl_mean == 0
    assert drift.kl_p99 == 0
    assert drift.top1_agreement == 1
    assert drift.perplexity_increase == 0


def test_adding_a_constant_to_all_logits_is_no_drift() -> None:
    logits = random_logits(7, 13, seed=1)
    drift = total_drift([chunk_drift(logits, logits + 5, torch.arange(6))])
    assert drift.kl_mean == pytest.approx(0, abs=1e-6)  # float32 rounding of log-softmax


def test_kl_and_perplexity_equal_their_definitions() -> None:
    base, other = random_logits(5, 11, seed=2), random_logits(5, 11, seed=3)
    following = torch.tensor([3, 1, 4, 1])
    drift = total_drift([chunk_drift(base, other, following)])
    p, q = base.double().softmax(-1), other.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert drift.kl_mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert drift.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-5)
    likelihoods = [q[row, token].item() for row, token in enumerate(following)]
    assert drift.perplexity == pytest.approx(math.prod(likelihoods) ** (-1 / 4), rel=1e-5)


def test_drift_does_not_depend_on_how_positions_are_chunked() -> None:
    base, other = random_logits(10, 7, seed=4), random_logits(10, 7, seed=5)
    tokens = torch.randint(0, 7, (10,), generator=torch.Generator().manual_seed(6))
    whole = total_drift([chunk_drift(base, other, tokens[1:])])
    parts = total_drift(
        [chunk_drift(base[:3], other[:3], tokens[1:4]), chunk_drift(base[3:], other[3:], tokens[4:])]
    )
    assert parts.kl_mean == pytest.approx(whole.kl_mean)
    assert parts.perplexity == pytest.approx(whole.perplexity)
    assert parts.perplexity_base == pytest.approx(whole.perplexity_base)
    assert parts.top1_agreement == whole.top1_agreement


def test_top1_agreement_counts_positions_with_the_same_argmax() -> None:
    base = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    other = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0], [0.0, 2.0]])
    assert total_drift([chunk_drift(base, other, torch.tensor([0, 1, 0]))]).top1_agreement == 0.75
