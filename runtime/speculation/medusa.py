"""Drafts by Medusa: heads that each say one of the tokens ahead, from one hidden state of the target."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qtool.compile.heads.config import HeadConfig
from qtool.runtime.engines.contract import Floats, Ints
from qtool.runtime.request import SequenceState
from qtool.runtime.speculation.choosing import Chooser
from qtool.runtime.speculation.contract import EMPTY, Draft, DraftRequest, Seen
from qtool.runtime.speculation.pace import Pace
from qtool.runtime.speculation.tree import Tree


class MedusaDrafter:
    """Medusa-1 heads (Cai et al. 2024, section 2.1), in numpy.

    A drawn draft is a chain; a deterministic one is a chain or, with a width, a tree of the likeliest paths,
    heads taken as independent (section 2.1.2).
    """

    wants_hidden = True
    name = "medusa"

    def __init__(
        self,
        config: HeadConfig,
        tensors: Mapping[str, Floats],
        columns: Ints,
        chooser: Chooser,
        *,
        width: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tensors` are a head's, by their names in `heads.head.shapes`; `columns` of a row of hidden states
        are the final one."""
        self.max_tokens = config.num_heads
        self._config, self._tensors, self._columns = config, tensors, columns
        self._chooser, self._width = chooser, width
        self._hidden: dict[int, tuple[int, Floats]] = {}
        """Of each sequence: how many tokens were computed, and the last one's hidden state."""
        self._pace = Pace(clock)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft where the hidden state of the token before the last is known."""
        with self._pace.measuring(max(request.num_tokens for request in requests)):
            return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        known = self._hidden.get(request.sequence.id)
        if known is None or known[0] != len(request.sequence.tokens) - 1:
            return EMPTY
        tree = Tree(request, self._chooser, self._width)
        try:
            tree.begin(self._logits(known[1], 0), known[1])
            head = 1
            while tree.grows and head < self.max_tokens:
                logits = self._logits(known[1], head)
                count = len(tree.rows().frontier)
                tree.grow(np.repeat(logits[None], count, 0), np.repeat(known[1][None], count, 0))
                head += 1
        finally:
            tree.leave()
        return tree.draft()

    def _logits(self, hidden: Floats, head: int) -> Floats:
        for block in range(self._config.num_blocks):
            name = f"heads.{head}.{block}"
            inner = self._tensors[f"{name}.weight"] @ hidden
            if f"{name}.bias" in self._tensors:
                inner = inner + self._tensors[f"{name}.bias"]
            hidden = hidden + inner / (1 + np.exp(-inner))
        output = self._tensors.get(f"heads.{head}.lm_head.weight", self._tensors.get("lm_head.weight"))
        logits: Floats = output @ hidden  # type: ignore[operator] # `head.check` saw to it that one is there
        return logits

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        """Going by how long heads took."""
        return self._pace.expected_ms(max(request.num_tokens for request in requests)) * len(requests)

    def observe(self, seen: Sequence[Seen]) -> None:
        """Keep the last hidden state."""
        for each in seen:
            if each.hidden is not None:
                last = each.hidden[-1, self._columns]
                self._hidden[each.sequence.id] = each.sequence.num_computed, last

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """It has no pool."""

    def preempted(self, sequence: SequenceState) -> None:
        """The hidden state comes again."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop the hidden state."""
        self._hidden.pop(sequence.id, None)
