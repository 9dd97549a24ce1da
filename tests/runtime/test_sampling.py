"""Sampling against the definitions, and against the distribution it should follow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.request import SamplingParams
from qtool.runtime.sampling import NO_TOKEN, distribution, sample


def logits(vocab_size: int = 37, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab_size).astype(np.float32)


def expected(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0) -> np.ndarray:
    """Probabilities [V], straight from the definitions: sort everything, in float64."""
    scaled = row.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    ranked = sorted(range(len(row)), key=lambda token: (-probabilities[token], token))
    kept = ranked[: top_k or None]
    total, nucleus = sum(probabilities[kept]), []
    for token in kept:
        nucleus.append(token)
        if sum(probabilities[nucleus]) >= top_p * total:
            break
    nucleus = [token for token in nucleus if probabilities[token] >= min_p * probabilities.max()]
    result = np.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    return result


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 36, 37, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_the_distribution_is_the_one_defined(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = logits(seed=seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # float32 weights: a relative error of 1e-6 is a few units in the last place after exp.
    np.testing.assert_allclose(
        dense(row, params), expected(row, temperature, top_k, top_p, min_p), rtol=1e-5, atol=1e-9
    )


def dense(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probabilities [V] that are drawn from."""
    drawn = distribution(row, params)
    return drawn.weights.astype(np.float64) / drawn.total


def kept(row: np.ndarray, params: SamplingParams) -> list[int]:
    """The tokens that may be drawn."""
    return np.flatnonzero(distribution(row, params).weights).tolist()


@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("shape", ["flat", "peaked", "equal", "few equal", "two levels"])
def test_the_nucleus_of_a_large_vocabulary_is_the_one_that_sorting_gives(shape: str, top_p: float) -> None:
    vocab_size = 30_011
    row = {
        "flat": logits(vocab_size, spread=0.3),
        "peaked": logits(vocab_size, spread=3.0),
        "equal": np.zeros(vocab_size, np.float32),
        "few equal": logits(vocab_size, spread=1.0).round(0),
        "two levels": np.repeat(np.array([0, 1], np.float32), [vocab_size - 9000, 9000]),
    }[shape]
    weights = np.exp(row.astype(np.float64) - row.max())
    order = np.lexsort((np.arange(vocab_size), -row))
    size = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
    found = kept(row, SamplingParams(top_p=top_p))
    # Sums in float32 err by 1e-6 or so, which moves the end by a few tokens of 30,000 where all are alike.
    assert abs(len(found) - size) <= 1 + 1e-6 * vocab_size * len(found) / (top_p * vocab_size)
    assert found == sorted(order[: len(found)].tolist())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (1.2, 9, 0.9)],
)
def test_tokens_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    num_draws, row = 40_000, logits()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    generator = params.generator()
    drawn = [sample(row, params, generator) for _ in range(num_draws)]
    counts = np.bincount(drawn, minlength=len(row))
    wanted = expected(row, temperature, top_k, top_p) * num_draws
    assert counts[wanted == 0].sum() == 0
    drawn_from = wanted > 0
    statistic = ((counts[drawn_from] - wanted[drawn_from]) ** 2 / wanted[drawn_from]).sum()
    freedom = drawn_from.sum() - 1
    # Mean k, variance 2k: five standard deviations are never met by chance with this seed fixed.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_greedy_and_top_k_of_one_take_the_first_of_equal_logits() -> None:
    row = np.array([1, 4, 4, 0, 4], np.float32)
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=0.01)):
        assert sample(row, params, params.generator()) == 1


def test_top_k_keeps_exactly_k_of_equal_logits_the_lowest_ids_first() -> None:
    assert kept(np.zeros(9, np.float32), SamplingParams(top_k=4)) == [0, 1, 2, 3]


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sizes = {top_p: len(kept(row, SamplingParams(top_p=top_p))) for top_p in (0.49, 0.74, 0.8)}
    assert sizes == {0.49: 1, 0.74: 2, 0.8: 3}


def test_a_greedy_row_takes_nothing_from_its_generator() -> None:
    params = SamplingParams(temperature=0, seed=4)
    generator = params.generator()
    sample(logits(), params, generator)
    assert generator.random() == params.generator().random()


def test_extreme_logits_and_temperatures_neither_overflow_nor_draw_the_impossible() -> None:
    row = np.array([-np.inf, 3e38, -3e38, 0], np.float32)
    for temperature in (1e-300, 1e-30, 1.0, 1e30):
        params = SamplingParams(temperature=temperature, seed=0)
        assert sample(row, params, params.generator()) in ({1} if temperature < 1e30 else {1, 2, 3})


def test_tokens_of_no_probability_are_never_drawn() -> None:
    drawn = distribution(np.array([-np.inf, 0, 0, -np.inf], np.float32), SamplingParams())
    generator = np.random.default_rng(0)
    assert {drawn.draw(generator) for _ in range(200)} == {1, 2}


def test_a_large_vocabulary_is_drawn_from_as_a_small_one_is() -> None:
    """In chunks, of which the last is short: tokens grouped by twenty, lest most be too rare to count."""
    drawn, generator, num_draws = (
        distribution(logits(vocab_size=1001), SamplingParams()),
        np.random.default_rng(1),
        40_000,
    )
    counts = np.bincount([drawn.draw(generator) for _ in range(num_draws)], minlength=1001)
    groups = np.arange(0, 1001, 20)
    wanted = np.add.reduceat(drawn.probs().astype(np.float64), groups) * num_draws
    statistic = ((np.add.reduceat(counts, groups) - wanted) ** 2 / wanted).sum()
    assert statistic < len(groups) + 5 * np.sqrt(2 * len(groups))


def test_a_seed_gives_the_same_tokens_of_logits_that_kernels_round_otherwise() -> None:
    """Many of the tokens are narrower than what borders of a cumulative distribution would move by."""
    row, noise = logits(vocab_size=50_000, spread=3.0), np.random.default_rng(5)
    params = SamplingParams(seed=7)
    first, second = params.generator(), params.generator()
    tokens = [sample(row, params, first) for _ in range(1000)]
    moved = (row + noise.normal(0, 1e-5, row.shape)).astype(np.float32)
    assert [sample(moved, params, second) for _ in range(1000)] == tokens


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_has_no_token(bad: float) -> None:
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature)
        row = logits()
        row[5] = bad
        assert sample(row, params, params.generator()) == NO_TOKEN
        assert sample(np.full(3, -np.inf, np.float32), params, params.generator()) == NO_TOKEN
