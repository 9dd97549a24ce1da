"""From logits to tokens. Pure numpy; a row's token depends on that row, its parameters and its generator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.runtime.engines.contract import Floats
from qtool.runtime.request import SamplingParams

NO_TOKEN = -1
"""Stands for the token of a row whose logits have no finite maximum."""


_CHUNK = 256


@dataclass(frozen=True)
class Distribution:
    """What one token is drawn from: token ids [n], ascending, and their probabilities [n], summing to 1."""

    token_ids: NDArray[np.integer]
    probabilities: Floats

    def draw(self, uniform: float) -> int:
        """The token at a point of [0, 1) of the cumulative distribution; never one of probability 0."""
        # First the chunk, then the place in it: summing in order is slow, and most of it is not needed.
        sums = np.add.reduceat(self.probabilities, np.arange(0, len(self.probabilities), _CHUNK))
        chunk, rest = _locate(sums, uniform)
        start = chunk * _CHUNK
        place, _ = _locate(self.probabilities[start : start + _CHUNK], rest)
        return int(self.token_ids[start + place])


def _locate(weights: Floats, point: float) -> tuple[int, float]:
    """Which of the weights, laid end to end, a point falls into, and how far."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    # Sums round: a point beyond the end belongs to the last weight that is not 0.
    point = min(point, float(np.nextafter(cumulative[-1], 0)))
    index = int(np.searchsorted(cumulative, point, side="right"))
    return index, point - float(cumulative[index - 1]) if index else point


def sample(
    logits: Floats, params: Sequence[SamplingParams], generators: Sequence[np.random.Generator]
) -> list[int]:
    """One token for each row of logits [R, V]; NO_TOKEN for a row that is not finite.

    A row that is sampled takes one number from its generator, a greedy one takes none.
    """
    best = logits.argmax(axis=1)
    peaks = logits[np.arange(len(best)), best]
    tokens: list[int] = best.tolist()
    for row, peak in enumerate(peaks.tolist()):
        if not np.isfinite(peak):
            tokens[row] = NO_TOKEN
        elif params[row].temperature > 0:
            tokens[row] = distribution(logits[row], params[row]).draw(generators[row].random())
    return tokens


def distribution(logits: Floats, params: SamplingParams) -> Distribution:
    """The distribution that logits [V] give at a temperature above 0: temperature, then top-k, then top-p.

    Top-p is the nucleus of Holtzman et al. (2020, section 3.1), the smallest set of likeliest tokens whose
    probabilities, renormalised after top-k, sum to top_p or more. Equal logits rank by token id, lowest
    first, so that top-k keeps exactly k tokens and top-k of 1 is greedy.
    """
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to exp(-inf)
        weights = (logits - logits.max()) / np.float32(params.temperature)
    np.exp(weights, out=weights)
    total = float(weights.sum())
    vocab_size = len(weights)
    top_k = min(params.top_k or vocab_size, vocab_size)
    if top_k == vocab_size and params.top_p == 1:
        return Distribution(np.arange(vocab_size), weights / np.float32(total))
    if top_k < vocab_size:
        ranked = np.partition(weights, vocab_size - top_k)[vocab_size - top_k :]
        total = float(ranked.sum())
    else:
        # Tokens below this hold less than 1 - top_p together, so the nucleus lies above: less to sort.
        ranked = weights[weights >= np.float32((1 - params.top_p) * total / vocab_size)]
    size = len(ranked)
    if params.top_p < 1:
        ranked = np.sort(ranked)[::-1]
        cumulative = np.cumsum(ranked, dtype=np.float64)
        size = min(size, int(np.searchsorted(cumulative, params.top_p * total)) + 1)
    least = ranked[:size].min()
    token_ids = np.flatnonzero(weights >= least)
    if len(token_ids) > size:
        equal = np.flatnonzero(weights[token_ids] == least)
        token_ids = np.delete(token_ids, equal[size - len(token_ids) :])
    kept = weights[token_ids]
    return Distribution(token_ids, kept / kept.sum())
