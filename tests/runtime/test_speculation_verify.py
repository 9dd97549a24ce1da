"""Verification leaves the target's distribution as it is: a million draws for each kind of draft."""

import numpy as np
import pytest

from qtool.runtime.speculation.verify import draw, draw_block, draw_from

DRAWS = 1_000_000
P = np.array([0.5, 0.2, 0.2, 0.1, 0.0])
DRAFTS = {
    "good": np.array([0.45, 0.25, 0.2, 0.08, 0.02]),
    "bad": np.array([0.02, 0.03, 0.1, 0.4, 0.45]),
    "equal": P,
    "disjoint": np.array([0.0, 0.0, 0.0, 0.0, 1.0]),
    "sure and wrong": np.array([0.0, 0.0, 0.0, 1.0, 0.0]),
}


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """Of counts against probabilities, by degree of freedom; what has no probability must not occur, and what
    is rare counts together, since chi-square wants some draws of each."""
    assert found[expected == 0].sum() == 0
    common = expected * found.sum() >= 10
    counts = np.append(found[common], found[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * found.sum()
    deviations = (counts - wanted) ** 2 / np.maximum(wanted, 10)
    return float(deviations.sum()) / max(len(counts) - 2, 1)


def bound(cells: int) -> float:
    """By degree of freedom, chi-square has mean 1 and variance 2 / degrees: six standard deviations."""
    return 1 + 6 * (2 / (cells - 1)) ** 0.5


def without_replacement(generator: np.random.Generator, q: np.ndarray, count: int) -> np.ndarray:
    """[DRAWS, count] draws, by Gumbel noise: the largest are a sample without replacement, in order."""
    with np.errstate(divide="ignore"):
        noisy = np.log(q) + generator.gumbel(size=(DRAWS, len(q)))
    return np.argsort(-noisy, axis=-1)[:, :count]


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_token_is_distributed_as_the_target_says_whatever_was_drafted(name: str, count: int) -> None:
    q, generator = DRAFTS[name], np.random.default_rng(5)
    if np.count_nonzero(q) < count:
        count = 1
    shape = (DRAWS, len(P))
    candidates = without_replacement(generator, q, count)
    uniforms = generator.random((DRAWS, count + 1))
    tokens = draw(np.broadcast_to(P, shape), candidates, np.broadcast_to(q, shape), uniforms)
    assert chi_square(np.bincount(tokens, minlength=5), P) < bound(4)
    # One draft is accepted with the largest probability that leaves p as it is.
    accepted = (tokens[:, None] == candidates).any(axis=1).mean()
    assert accepted >= np.minimum(P, q).sum() - 0.002
    if count == 1:
        assert accepted <= np.minimum(P, q).sum() + 0.002


def test_a_deterministic_draft_is_accepted_with_its_own_probability() -> None:
    q = np.eye(5)[1]
    candidates = np.ones((DRAWS, 1), np.int64)
    uniforms = np.random.default_rng(0).random((DRAWS, 2))
    tokens = draw(np.broadcast_to(P, (DRAWS, 5)), candidates, np.broadcast_to(q, (DRAWS, 5)), uniforms)
    assert chi_square(np.bincount(tokens, minlength=5), P) < bound(4)
    assert abs((tokens == 1).mean() - P[1]) < 0.002


@pytest.mark.parametrize("wrong", [0.0, 0.15])
def test_a_block_is_distributed_as_the_target_says_and_keeps_more_than_token_by_token(wrong: float) -> None:
    """All pairs and triples that come out, over a target and a draft that are Markov chains."""
    generator = np.random.default_rng(7)
    p, q = generator.dirichlet(np.ones(4), size=4), generator.dirichlet(np.ones(4), size=4)
    drafts, texts = np.zeros((DRAWS, 0), np.int64), np.zeros((DRAWS, 1), np.int64)
    for _ in range(2):
        last = draw_from(q[texts[:, -1]], generator.random(DRAWS))
        texts = np.column_stack([texts, last])
    drafts = texts[:, 1:]
    told = q + wrong  # a q that is not what was drawn from has to show
    told /= told.sum(axis=1, keepdims=True)
    count, following = draw_block(p[texts], drafts, told[texts[:, :-1]], generator.random((DRAWS, 3)))
    result = np.zeros((DRAWS, 3), np.int64)
    last = np.zeros(DRAWS, np.int64)
    for place in range(3):
        drawn = draw_from(p[last], generator.random(DRAWS))
        kept = drafts[:, min(place, 1)]
        last = np.where(place < count, kept, np.where(place == count, following, drawn))
        result[:, place] = last
    expected = np.array([p[0][a] * p[a][b] * p[b][c] for a in range(4) for b in range(4) for c in range(4)])
    off = chi_square(np.bincount(result @ [16, 4, 1], minlength=64), expected)
    assert off < bound(64) if wrong == 0 else off > 10 * bound(64)
    if wrong == 0:
        alive, singly = np.ones(DRAWS, np.bool_), 0.0
        for place in range(2):
            token = draw(
                p[texts[:, place]],
                drafts[:, place, None],
                q[texts[:, place]],
                generator.random((DRAWS, 2)),
            )
            alive &= token == drafts[:, place]
            singly += alive.mean()
        assert count.mean() > singly + 0.005


def test_a_q_that_is_not_what_was_drawn_from_is_seen() -> None:
    generator = np.random.default_rng(1)
    candidates = without_replacement(generator, DRAFTS["bad"], 1)
    told = np.broadcast_to(DRAFTS["good"], (DRAWS, 5))
    uniforms = generator.random((DRAWS, 2))
    tokens = draw(np.broadcast_to(P, (DRAWS, 5)), candidates, told, uniforms)
    assert abs(np.bincount(tokens, minlength=5) / DRAWS - P).sum() / 2 > 0.1
