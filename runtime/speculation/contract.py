"""What a drafter is: it proposes tokens that one step of the target then verifies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from qtool.runtime.engines.contract import Bools, Floats, Ints
from qtool.runtime.request import SequenceState

ROOT = -1
"""As a parent: the sequence's last token."""


@dataclass(frozen=True)
class Draft:
    """D tokens that may follow a sequence: a chain, or a tree whose branches share what they begin with.

    A deterministic draft (`probs` None) is a function of the sequence alone: nothing random chose its tokens,
    their number or their order. Its q is one-hot. A tree whose nodes are picked by their values, as
    EAGLE-2's are, has to be deterministic.

    A drawn draft has each token drawn from its q; siblings one after the other from one q, without
    replacement, in the order in which they lie here. No token may be left out or added for what was drawn.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    """[D], of each token the place of the one before it, lower than its own, or ROOT; None is a chain.
    Siblings differ."""
    probs: Sequence[Floats] | None = None
    """[D] distributions q [V], summing to 1: what each token was drawn from, before elder siblings were taken
    out. Siblings have the same one. None for a deterministic draft."""
    kind: int = 0
    """Statistics of acceptance are kept apart by it: for a drafter that knows which drafts are better."""
    num_considered: int = 0
    """Tokens that were drafted, those that are left out for being unlikely included."""

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> Ints:
        """[D], 1 for a token that follows the sequence's last."""
        if self.parents is None:
            return np.arange(1, len(self.tokens) + 1, dtype=np.int32)
        depths = np.ones(len(self.tokens), np.int32)
        for place, parent in enumerate(self.parents):
            if parent != ROOT:
                depths[place] = depths[parent] + 1
        return depths

    def mask(self) -> Bools:
        """[1 + D, 1 + D] for `Step.masks`, the sequence's last token first: each sees its ancestors and
        itself."""
        mask = np.eye(1 + len(self.tokens), dtype=np.bool_)
        mask[:, 0] = True
        for place in range(len(self.tokens)):
            parent = place - 1 if self.parents is None else self.parents[place]
            mask[1 + place] |= mask[1 + parent]
        return mask

    def children(self, place: int) -> list[int]:
        """Places of the tokens that follow the one at `place`, or ROOT, in order."""
        if self.parents is None:
            return [place + 1] if place + 1 < len(self.tokens) else []
        return [child for child, parent in enumerate(self.parents) if parent == place]

    def shortened(self, num_tokens: int) -> "Draft":
        """Its first tokens only: of a drawn draft, a number that does not depend on what was drawn."""
        if num_tokens >= len(self.tokens):
            return self
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            parents=None if self.parents is None else self.parents[:num_tokens],
            probs=None if self.probs is None else self.probs[:num_tokens],
        )


EMPTY = Draft(())


@dataclass(frozen=True)
class DraftRequest:
    """A sequence that a draft is wanted for; all but its last token is computed by the target."""

    sequence: SequenceState
    num_tokens: int
    """Tokens at most, 1 or more: a chain's length or a tree's size."""

    @property
    def deterministic(self) -> bool:
        """Whether the draft has to be: for a greedy sequence, and for a seeded one, whose tokens are then
        those that it has without speculation, however many drafts were verified."""
        params = self.sequence.params
        return params.temperature == 0 or params.seed is not None


@dataclass(frozen=True)
class Seen:
    """What a step computed of one sequence and kept: a chunk of its prompt, or its last token and the drafts
    that were accepted. `sequence` is as it is after the step: the next token is appended to its tokens, and
    `num_computed` counts those that were kept."""

    sequence: SequenceState
    num_tokens: int
    """The last so many of its computed tokens: positions num_computed - num_tokens … num_computed - 1."""
    hidden: Floats | None = None
    """[num_tokens, F], the hidden states of those tokens; None unless the drafter wants them."""


class Drafter(Protocol):
    """Proposes tokens for a ragged batch. Called in the engine loop's thread only.

    It may own an engine with its own pool and block manager, or a pool of its own that mirrors the target's
    blocks: it finds them in the sequences' tables, and is told of copies.
    """

    name: str
    """As metrics and reports show it."""
    max_tokens: int
    """Tokens of a draft at most."""
    wants_hidden: bool
    """Whether steps shall give hidden states, of every token that they compute."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft for each request, in their order; an empty one where there is nothing to propose.

        Sequences are left as they are, a constraint that was moved on included (`TokenConstraint.rollback`).
        A draft for a request that wants a deterministic one is so.
        """
        ...

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        """Milliseconds that `propose` should take, going by those that it took; 0 where that is nothing
        beside a step."""
        ...

    def observe(self, seen: Sequence[Seen]) -> None:
        """Take in what a step computed, whoever drafted, or nobody."""
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Blocks (source, target) of the target's pool are about to be copied, one after the other."""
        ...

    def preempted(self, sequence: SequenceState) -> None:
        """The sequence gave up its blocks of the target's pool, and will be computed again."""
        ...

    def forget(self, sequence: SequenceState) -> None:
        """The sequence ended, failed or was cancelled; it may never have been seen."""
        ...
