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

_SHARED = "lm_head.weight"


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
        whole: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`tensors` are a head's, by their names in `heads.head.shapes`; `columns` of a row of hidden states
        are the final one. `whole` drafts are not cut where they are unlikely."""
        self.max_tokens = config.num_heads
        self._config, self._tensors, self._columns = config, tensors, columns
        self._chooser, self._width, self._whole = chooser, width, whole
        self._hidden: dict[int, tuple[int, Floats]] = {}
        """Of each sequence: how many tokens were computed, and the last one's hidden state."""
        self._pace = Pace(clock)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """A draft where the hidden state of the token before the last is known."""
        depth = min(max(request.num_tokens for request in requests), self.max_tokens)
        with self._pace.measuring(depth):
            drafts: list[Draft] = [EMPTY] * len(requests)
            ready = [place for place, request in enumerate(requests) if self._is_known(request)]
            if not ready:
                return drafts
            hidden = np.stack([self._hidden[requests[place].sequence.id][1] for place in ready])
            for place, state, logits in zip(ready, hidden, self._logits(hidden, depth), strict=True):
                drafts[place] = self._draft(requests[place], state, logits)
            return drafts

    def _is_known(self, request: DraftRequest) -> bool:
        known = self._hidden.get(request.sequence.id)
        return known is not None and known[0] == len(request.sequence.tokens) - 1

    def _draft(self, request: DraftRequest, hidden: Floats, logits: Floats) -> Draft:
        tree = Tree(request, self._chooser, self._width, whole=self._whole)
        try:
            tree.begin(logits[0], hidden)
            for ahead in logits[1:]:
                if not tree.grows:
                    break
                count = len(tree.rows().frontier)
                tree.grow(np.repeat(ahead[None], count, 0), np.repeat(hidden[None], count, 0))
        finally:
            tree.leave()
        return tree.draft()

    def _logits(self, hidden: Floats, depth: int) -> Floats:
        """[B, depth, draft vocabulary] of the first heads; one product where they share the output matrix."""
        states = np.stack([self._residual(hidden, head) for head in range(depth)], axis=1)
        if _SHARED in self._tensors:
            logits: Floats = states.reshape(-1, states.shape[-1]) @ self._tensors[_SHARED].T
            return logits.reshape(*states.shape[:2], -1)
        outputs = [self._tensors[f"heads.{head}.lm_head.weight"] for head in range(depth)]
        return np.stack([states[:, head] @ output.T for head, output in enumerate(outputs)], axis=1)

    def _residual(self, hidden: Floats, head: int) -> Floats:
        """What a head makes of hidden states [B, hidden]."""
        for block in range(self._config.num_blocks):
            name = f"heads.{head}.{block}"
            inner = hidden @ self._tensors[f"{name}.weight"].T
            if f"{name}.bias" in self._tensors:
                inner = inner + self._tensors[f"{name}.bias"]
            hidden = hidden + inner / (1 + np.exp(-inner))
        return hidden

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        """Going by how long heads took."""
        return self._pace.expected_ms(min(max(request.num_tokens for request in requests), self.max_tokens))

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
