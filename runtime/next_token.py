"""What logits give: the next token of each sequence whose end a step reached, and prompts' logprobs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Floats
from qtool.runtime.logits import adjusted
from qtool.runtime.logprobs import TokenLogprobs, token_logprobs
from qtool.runtime.request import SequenceState
from qtool.runtime.sampling import NO_TOKEN, sample
from qtool.runtime.scheduler import Chunk

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextToken:
    """A token, or why there is none."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def next_tokens(logits: Sequence[Floats] | Floats, sequences: Sequence[SequenceState]) -> list[NextToken]:
    """Choose a token for each of R sequences by its row of logits [V]. The sequences are not changed, but
    their generators are, and their constraints accept the tokens."""
    return [_next_token(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]


def _next_token(row: Floats, sequence: SequenceState) -> NextToken:
    params = sequence.params
    try:
        token = sample(adjusted(row, sequence), params, sequence.generator)
        if token == NO_TOKEN:
            return NextToken(None, error=_why_none(row))
        if sequence.constraint is not None:
            sequence.constraint.accept(token)
    except Exception as error:  # a grammar that fails, however it does, must not end the other requests
        _log.exception("a sequence fails where its next token is chosen")
        return NextToken(None, error=f"{type(error).__name__}: {error}")
    if params.logprobs is None:
        return NextToken(token)
    return NextToken(token, token_logprobs(row, token, params.logprobs))


def _why_none(row: Floats) -> str:
    if np.isfinite(row.max()):
        return "no token is left to choose: the request's rules forbid every one"
    return "the model gave logits that are not finite"


def report_prompts(logits: Floats, chunks: Sequence[Chunk]) -> None:
    """Append to sequences that want them the log-probabilities of prompt tokens that these chunks precede.

    `logits` [R, V] are the chunks' rows, before they are committed.
    """
    row = 0
    for chunk in chunks:
        sequence, rows = chunk.sequence, logits[row : row + chunk.num_logits]
        row += chunk.num_logits
        num_top = sequence.params.prompt_logprobs
        if num_top is None or len(sequence.prompt_logprobs) == sequence.num_prompt:
            continue
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        first = sequence.num_computed + chunk.num_new - chunk.num_logits + 1
        for place, logits_before in enumerate(rows, first):
            if len(sequence.prompt_logprobs) == place < sequence.num_prompt:
                sequence.prompt_logprobs.append(
                    token_logprobs(logits_before, sequence.tokens[place], num_top)
                )
