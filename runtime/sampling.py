"""From logits to tokens. Pure numpy; a row's token depends on that row, its parameters and its generator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.runtime.engines.contract import Floats
from qtool.runtime.request import SamplingParams

NO_TOKEN = -1
"""Stands for the token of a row whose logits have no finite maximum."""


@dataclass(frozen=True)
class Distribution:
    """What one token is drawn from: token ids [n] and their probabilities [n], which sum to 1."""

    token_ids: NDArray[np.int64]
    probabilities: Floats

    def draw(self, uniform: float) -> int:
        """The token at a point of [0, 1) of the cumulative distribution; never one of probability 0."""
        cumulative = np.cumsum(self.probabilities, dtype=np.float64)
        total = cumulative[-1]
        # A point rounded up to the total would lie past the last token.
        point = min(uniform * total, np.nextafter(total, 0))
        return int(self.token_ids[np.searchsorted(cumulative, point, side="right")])


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
        weights = np.exp((logits - logits.max()) / np.float32(params.temperature), dtype=np.float32)
    total = float(weights.sum(dtype=np.float64))
    vocab_size = len(weights)
    top_k = min(params.top_k or vocab_size, vocab_size)
    if top_k == vocab_size and params.top_p == 1:
        return Distribution(np.arange(vocab_size), weights / np.float32(total))
    if top_k < vocab_size:
        cut = np.partition(weights, vocab_size - top_k)[vocab_size - top_k]
    else:
        # Tokens below this hold less than 1 - top_p together, so the nucleus lies above: no full sort.
        cut = np.float32((1 - params.top_p) * total / vocab_size)
    candidates = np.flatnonzero(weights >= cut)
    ranked = candidates[np.argsort(-weights[candidates], kind="stable")][:top_k]
    kept = weights[ranked]
    if params.top_p < 1:
        cumulative = np.cumsum(kept, dtype=np.float64)
        whole = cumulative[-1] if top_k < vocab_size else total
        size = int(np.searchsorted(cumulative, params.top_p * whole, side="left")) + 1
        ranked, kept = ranked[:size], kept[:size]
    return Distribution(ranked, kept / kept.sum(dtype=np.float64).astype(np.float32))
