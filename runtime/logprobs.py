"""Log-probabilities of tokens, as the model gives them: before temperature, penalties and masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Floats


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, and the likeliest tokens in its place; natural logarithms."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Token and log-probability, the likeliest first, equal ones by token id."""


def token_logprobs(logits: Floats, token: int, num_top: int) -> TokenLogprobs:
    """The log-probability of a token under logits [V], and the `num_top` likeliest."""
    peak = logits.max()
    log_total = peak + np.log(np.exp(logits - peak).sum())
    top = _largest(logits, num_top)
    return TokenLogprobs(
        token,
        float(logits[token] - log_total),
        tuple((index, float(logits[index] - log_total)) for index in top),
    )


def _largest(logits: Floats, count: int) -> Sequence[int]:
    count = min(count, len(logits))
    if count == 0:
        return []
    least = np.partition(logits, len(logits) - count)[-count]
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    found: list[int] = candidates[order].tolist()
    return found
