"""What logits give: the next token of each sequence whose end a step reached, and prompts' logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Floats
from qtool.runtime.logits import adjusted
from qtool.runtime.logprobs import TokenLogprobs, token_logprobs
from qtool.runtime.request import SequenceState
from qtool.runtime.sampling import NO_TOKEN, sample
from qtool.runtime.scheduler import Chunk


@dataclass(frozen=True)
class NextToken:
    """A token, or why there is none."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def next_tokens(logits: Sequence[Floats] | Floats, sequences: Sequence[SequenceState]) -> list[NextToken]:
    """Choose a token for each of R sequences by its row of logits [V]. The sequences are not changed, but
    their generators are, and their constraints accept the tokens."""
    rows = [adjusted(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]
    tokens = sample(
        rows, [sequence.params for sequence in sequences], [sequence.generator for sequence in sequences]
    )
    return [
        _report(row, sequence, token) for row, sequence, token in zip(logits, sequences, tokens, strict=True)
    ]


def _report(row: Floats, sequence: SequenceState, token: int) -> NextToken:
    if token == NO_TOKEN:
        if not np.isfinite(row.max()):
            return NextToken(None, error="the model gave logits that are not finite")
        return NextToken(None, error="no token is left to choose: the request's rules forbid every one")
    if sequence.constraint is not None:
        sequence.constraint.accept(token)
    num_top = sequence.params.logprobs
    return NextToken(token, None if num_top is None else token_logprobs(row, token, num_top))


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
