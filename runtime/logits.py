"""What a request's parameters and its constraint do to logits before a token is chosen."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qtool.runtime.constraint import TokenConstraint, allowed_tokens, bitmask_width
from qtool.runtime.engines.contract import Floats
from qtool.runtime.request import SamplingParams, SequenceState


def adjusted(logits: Floats, sequence: SequenceState, drafted: Sequence[int] = ()) -> Floats:
    """The logits [V] that a sequence's next token is chosen by; the same array where nothing changes them.

    With `drafted` tokens, the one after them; the sequence's constraint has accepted them.

    In this order: penalties, logit_bias, what min_tokens, bad_words and allowed_token_ids forbid, and what
    the constraint forbids.
    """
    params = sequence.params
    if not params.adjusts_logits and sequence.constraint is None:
        return logits
    row = logits.copy()
    prompt, generated = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
    generated += drafted
    penalize(row, params, prompt, generated)
    if params.logit_bias:
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    forbid(row, params, generated)
    if sequence.constraint is not None:
        np.putmask(row, ~_allowed(sequence.constraint, len(row)), -np.inf)
    return row


def penalize(row: Floats, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> None:
    """Make tokens that were there before less likely, in place.

    The repetition penalty divides a positive logit and multiplies a negative one, for tokens of prompt and
    answer (CTRL, Keskar et al. 2019, section 4.1). OpenAI's two count the answer's tokens only: `frequency`
    for every occurrence, `presence` once.
    """
    if params.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *generated]))
        values = row[seen]
        factor = np.float32(params.repetition_penalty)
        row[seen] = np.where(values > 0, values / factor, values * factor)
    if generated and (params.presence_penalty or params.frequency_penalty):
        seen, counts = np.unique(np.array(generated), return_counts=True)
        row[seen] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row[seen] -= np.float32(params.presence_penalty)


def forbid(row: Floats, params: SamplingParams, generated: Sequence[int]) -> None:
    """Set to -inf, in place, what may not come next."""
    forbidden = [
        words[-1]
        for words in params.bad_words
        if len(words) == 1 or list(words[:-1]) == list(generated[1 - len(words) :])
    ]
    if len(generated) < params.min_tokens:
        forbidden += params.stop_token_ids
    row[forbidden] = -np.inf
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        kept = row[allowed]
        row.fill(-np.inf)
        row[allowed] = kept


def _allowed(constraint: TokenConstraint, vocab_size: int) -> NDArray[np.bool_]:
    row = np.zeros(bitmask_width(vocab_size), np.int32)
    constraint.fill_mask(row)
    return allowed_tokens(row, vocab_size)
