"""What logits give: the tokens that follow a sequence, and prompts' logprobs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Floats
from qtool.runtime.failures import GenerationError, NoTokenLeftError
from qtool.runtime.logits import adjusted
from qtool.runtime.logprobs import TokenLogprobs, token_logprobs
from qtool.runtime.request import SequenceState
from qtool.runtime.sampling import NO_TOKEN, distribution, sample
from qtool.runtime.scheduler import Chunk
from qtool.runtime.speculation import verify
from qtool.runtime.speculation.contract import EMPTY, ROOT, Draft

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NextToken:
    """A token, or why there is none."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    error: GenerationError | None = None


@dataclass(frozen=True)
class Extension:
    """What a step adds to a sequence."""

    chosen: list[NextToken]
    """One or more; only the last may lack its token."""
    accepted: list[int]
    """Places of the draft's tokens that are among them, in order."""


def extend(
    sequence: SequenceState, logits: Floats, draft: Draft = EMPTY, *, block_verification: bool = False
) -> Extension:
    """Append the next token to a sequence, and those before it that the target accepts of a draft.

    `logits` [1 + D, V] are those of the sequence's last token and of the draft's. Each token is chosen as
    without a draft, and where it is one of the draft's, the row after it is there to choose the next one by.
    So every rule that holds for a token holds for these, those that end the sequence too. For a deterministic
    draft that is all: to draw from p and compare accepts a draft x with probability p(x) and leaves p without
    x, as rejection sampling by a one-hot q does, and a seed gives the tokens that it gives without drafts. By
    a drawn draft's q a token is chosen so that it is a draft more often (`verify.draw`).
    """
    chosen: list[NextToken] = []
    accepted: list[int] = []
    decided: Sequence[int] = ()
    if block_verification and draft.probs is not None and draft.parents is None:
        try:
            decided = _decide_together(sequence, logits, draft)
        except Exception as error:
            return Extension([_failed(error)], [])
    place = ROOT
    while True:
        children = draft.children(place)
        row = logits[place + 1]
        if len(chosen) < len(decided):
            found = _take(decided[len(chosen)], row, sequence)
        else:
            found = next_token(row, sequence, draft, children)
        chosen.append(found)
        if found.token is None:
            break
        sequence.tokens.append(found.token)
        place = next((child for child in children if draft.tokens[child] == found.token), ROOT)
        if place == ROOT:
            break
        accepted.append(place)
        if sequence.finish_reason() is not None:
            break
    return Extension(chosen, accepted)


def next_token(
    row: Floats, sequence: SequenceState, draft: Draft = EMPTY, children: Sequence[int] = ()
) -> NextToken:
    """Choose a sequence's next token by its logits [V], given the places of the drafts for it. The sequence
    is not changed, but its generator is, and its constraint accepts the token."""
    try:
        token = _choose(adjusted(row, sequence), sequence, draft, children)
        if token == NO_TOKEN:
            return NextToken(None, error=_why_none(row, sequence))
        return _take(token, row, sequence)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> NextToken:
    """A sequence that fails, however it does, must not end the others."""
    _log.error("a sequence fails where its next token is chosen", exc_info=error)
    return NextToken(None, error=GenerationError(f"{type(error).__name__}: {error}"))


def _choose(row: Floats, sequence: SequenceState, draft: Draft, children: Sequence[int]) -> int:
    """A token by adjusted logits, given the drafts for its place."""
    params, generator = sequence.params, sequence.generator
    if draft.probs is None or not children or params.temperature == 0 or not np.isfinite(row.max()):
        return sample(row, params, generator)
    p = distribution(row, params).probs()
    candidates = np.array([draft.tokens[child] for child in children])
    return int(verify.draw(p, candidates, draft.probs[children[0]], generator.random(len(children) + 1)))


def _decide_together(sequence: SequenceState, logits: Floats, draft: Draft) -> list[int]:
    """The tokens that block verification accepts of a drawn chain, and the one that follows them."""
    params, constraint = sequence.params, sequence.constraint
    assert draft.probs is not None
    p: list[Floats] = []
    num_moved = 0
    for place in range(len(draft) + 1):
        row = adjusted(logits[place], sequence, draft.tokens[:place])
        if not np.isfinite(row.max()):
            break
        p.append(distribution(row, params).probs())
        if place == len(draft):
            break
        token = draft.tokens[place]
        if p[-1][token] == 0 or token in params.stop_token_ids:
            break
        if constraint is not None:
            constraint.accept(token)
            num_moved += 1
            if constraint.finished:
                break
    if constraint is not None:
        constraint.rollback(num_moved)
    if not p:
        return []
    is_whole = len(p) > len(draft)
    if not is_whole:  # nothing that follows is of interest, so anything may stand for it
        p.append(p[-1])
    num_candidates = len(p) - 1
    candidates = np.array(draft.tokens[:num_candidates])
    q = np.stack(draft.probs[:num_candidates])
    uniforms = sequence.generator.random(num_candidates + 1)
    count, following = verify.draw_block(np.stack(p), candidates, q, uniforms)
    kept = list(draft.tokens[: int(count)])
    return kept if int(count) == num_candidates and not is_whole else [*kept, int(following)]


def _take(token: int, row: Floats, sequence: SequenceState) -> NextToken:
    """The token that was chosen by a row of logits, as the constraint accepts it and with its report."""
    if sequence.constraint is not None:
        sequence.constraint.accept(token)
        if sequence.constraint.failure is not None:
            return NextToken(None, error=GenerationError(sequence.constraint.failure))
    if sequence.params.logprobs is None:
        return NextToken(token)
    return NextToken(token, token_logprobs(row, token, sequence.params.logprobs))


def _why_none(row: Floats, sequence: SequenceState) -> GenerationError:
    if sequence.constraint is not None and sequence.constraint.failure is not None:
        return GenerationError(sequence.constraint.failure)
    if np.isfinite(row.max()):
        rules = sequence.params.forbids + ["the grammar"] * (sequence.constraint is not None)
        return NoTokenLeftError(
            f"after {sequence.num_generated} tokens none is left to choose: the request's rules "
            f"({', '.join(rules)}) together forbid every one; loosen one of them"
        )
    return GenerationError("the model gave logits that are not finite")


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
