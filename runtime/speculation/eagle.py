"""Drafts by EAGLE: a layer of its own goes on from what the target thought of the last tokens."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qtool.runtime.blocks import BlockManager
from qtool.runtime.engines.contract import Floats, Ints, Step, StepResult
from qtool.runtime.request import SequenceState
from qtool.runtime.speculation.choosing import Chooser
from qtool.runtime.speculation.contract import EMPTY, Draft, DraftRequest, Seen
from qtool.runtime.speculation.draft_layer import DraftLayer
from qtool.runtime.speculation.pace import Pace
from qtool.runtime.speculation.tree import Rows, Tree

MAX_TOKENS = 6
_MOST_PENDING = 512
"""Features that wait for a draft to be wanted; of a longer text only the end is drafted from."""


@dataclass
class _Lane:
    """One sequence in the layer's pool. Slot s has the token at `start` + s and the feature before it."""

    start: int
    table: list[int] = field(default_factory=list)
    num_written: int = 0
    """Slots that have the target's features."""
    pending: list[Floats] = field(default_factory=list)
    """Features [n, hidden] of the slots after those, which wait for a draft to be wanted."""

    @property
    def end(self) -> int:
        """The position after the last one that there is a feature for."""
        return self.start + self.num_written + sum(map(len, self.pending))


@dataclass(frozen=True)
class Fusion:
    """How hidden states of the target become one feature."""

    columns: Ints
    """Of a row of hidden states, in the order in which the head reads them."""
    weight: Floats | None = None
    """[hidden, columns] of EAGLE-3; None takes them as they are."""
    bias: Floats | None = None

    def __call__(self, hidden: Floats) -> Floats:
        """[n, width] to [n, hidden]."""
        features: Floats = hidden[:, self.columns]
        if self.weight is not None:
            features = features @ self.weight.T
        return features if self.bias is None else features + self.bias


class EagleDrafter:
    """EAGLE-1 (Li et al. 2024) and EAGLE-3 (Li et al. 2025); with a width, EAGLE-2's trees (2024, section 4).

    A drawn draft is a chain; a deterministic one is the likeliest chain or tree, cut where it is unlikely to
    be accepted so far. Its pool is its own, of one layer: a prefix that the target took from its cache is not
    there, and the layer does without.
    """

    wants_hidden = True

    def __init__(
        self,
        name: str,
        layer: DraftLayer,
        fusion: Fusion,
        chooser: Chooser,
        *,
        max_tokens: int = MAX_TOKENS,
        width: int = 1,
        whole: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`width` above 1 drafts trees: so many tokens at each depth, where the layer takes masks. `whole`
        drafts are not cut where they are unlikely."""
        self.name = name
        self.max_tokens = max_tokens
        self._layer, self._fuse, self._chooser = layer, fusion, chooser
        self._whole = whole
        self._width = width if layer.takes_trees else 1
        self._blocks = BlockManager(layer.num_blocks, layer.block_size)
        self._lanes: dict[int, _Lane] = {}
        self._pace = Pace(clock)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Take in the features that wait, then draft depth by depth, for all requests together."""
        ready = [place for place, request in enumerate(requests) if self._is_ready(request)]
        if not ready:
            return [EMPTY] * len(requests)
        lags = any(self._lags(requests[place]) for place in ready)
        depth = max(requests[place].num_tokens for place in ready)
        with nullcontext() if lags else self._pace.measuring(depth):
            return self._propose(requests, ready)

    def _lags(self, request: DraftRequest) -> bool:
        """Whether more waits than a step with a draft leaves: a text's first draft, or a try after a while,
        says nothing of what a draft takes."""
        return sum(map(len, self._lanes[request.sequence.id].pending)) > self.max_tokens + 1

    def _propose(self, requests: Sequence[DraftRequest], ready: Sequence[int]) -> list[Draft]:
        """Drafts for the requests at the places `ready`, and empty ones for the others."""
        drafts: list[Draft] = [EMPTY] * len(requests)
        chosen = [requests[place] for place in ready]
        lanes = [self._lanes[request.sequence.id] for request in chosen]
        result = self._catch_up(chosen, lanes)
        trees = [
            Tree(request, self._chooser, self._width if request.deterministic else 1, whole=self._whole)
            for request in chosen
        ]
        for tree, logits, feature in zip(trees, result.logits, result.hidden, strict=True):
            tree.begin(logits, feature)
        try:
            while growing := [place for place, tree in enumerate(trees) if tree.grows]:
                self._grow([trees[place] for place in growing], [lanes[place] for place in growing])
        finally:
            for tree in trees:
                tree.leave()
        for place, tree in zip(ready, trees, strict=True):
            drafts[place] = tree.draft()
        return drafts

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        """Runs of the layer, one for each token of the longest draft."""
        return self._pace.expected_ms(max(request.num_tokens for request in requests))

    def observe(self, seen: Sequence[Seen]) -> None:
        """Keep features; they are taken in when a draft is wanted."""
        for each in seen:
            if each.hidden is None:
                continue
            features = self._fuse(each.hidden)
            first = each.sequence.num_computed - each.num_tokens + 1
            lane = self._lanes.get(each.sequence.id)
            if lane is None or lane.end != first:
                lane = self._restart(each.sequence, first)
            lane.pending.append(features)
            if sum(map(len, lane.pending)) > _MOST_PENDING:
                kept = np.concatenate(lane.pending)[-_MOST_PENDING:]
                self._restart(each.sequence, lane.end - len(kept)).pending.append(kept)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """The target's blocks are not its own."""

    def preempted(self, sequence: SequenceState) -> None:
        """What it has taken in holds; what is computed again is not what comes next, and begins anew."""

    def forget(self, sequence: SequenceState) -> None:
        """Free the sequence's blocks."""
        lane = self._lanes.pop(sequence.id, None)
        if lane is not None:
            self._blocks.free(lane.table)

    def _restart(self, sequence: SequenceState, start: int) -> _Lane:
        self.forget(sequence)
        self._lanes[sequence.id] = _Lane(start)
        return self._lanes[sequence.id]

    def _is_ready(self, request: DraftRequest) -> bool:
        """Whether all features up to the sequence's last token are there, and blocks for them and a draft."""
        lane = self._lanes.get(request.sequence.id)
        if lane is None or not lane.pending or lane.end != len(request.sequence.tokens):
            return False
        rows = request.num_tokens * self._width
        return self._blocks.grow(lane.table, lane.end - lane.start + rows)

    def _catch_up(self, requests: Sequence[DraftRequest], lanes: Sequence[_Lane]) -> StepResult:
        """Take in what waits; logits and feature of each sequence's last token."""
        features = [np.concatenate(lane.pending) for lane in lanes]
        counts = [len(part) for part in features]
        tokens = [
            request.sequence.tokens[lane.end - count : lane.end]
            for request, lane, count in zip(requests, lanes, counts, strict=True)
        ]
        positions = [np.arange(lane.end - count, lane.end) for lane, count in zip(lanes, counts, strict=True)]
        ends = np.cumsum(counts, dtype=np.int32) - 1
        result = self._run(lanes, tokens, positions, features, ends)
        for lane, count in zip(lanes, counts, strict=True):
            lane.num_written += count
            lane.pending = []
        return result

    def _grow(self, trees: Sequence[Tree], lanes: Sequence[_Lane]) -> None:
        """One depth more: each tree's tokens so far, or a chain's last one, behind what is written."""
        if self._width == 1:
            self._extend(trees, lanes)
            return
        rows = [tree.rows() for tree in trees]
        result = self._run(
            lanes,
            [row.tokens for row in rows],
            [lane.end + np.array(row.depths) - 1 for lane, row in zip(lanes, rows, strict=True)],
            [row.features for row in rows],
            _frontiers(rows),
            masks=[row.mask for row in rows],
        )
        begins = np.cumsum([0, *(len(row.frontier) for row in rows)]).tolist()
        for tree, begin, end in zip(trees, begins, begins[1:], strict=False):
            tree.grow(result.logits[begin:end], result.hidden[begin:end])

    def _extend(self, trees: Sequence[Tree], lanes: Sequence[_Lane]) -> None:
        ends = np.arange(len(trees), dtype=np.int32)
        result = self._run(
            lanes,
            [[tree.last.token] for tree in trees],
            [np.array([lane.end + tree.last.depth - 1]) for tree, lane in zip(trees, lanes, strict=True)],
            [tree.last.feature[None] for tree in trees],
            ends,
            drafted=[tree.last.depth - 1 for tree in trees],
        )
        for tree, logits, feature in zip(trees, result.logits, result.hidden, strict=True):
            tree.grow(logits[None], feature[None])

    def _run(
        self,
        lanes: Sequence[_Lane],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[NDArray[np.integer]],
        features: Sequence[Floats],
        rows: Ints,
        *,
        drafted: Sequence[int] | None = None,
        masks: Sequence[NDArray[np.bool_]] | None = None,
    ) -> StepResult:
        """Run the layer; logits and features of `rows`. `drafted` tokens of each lane are behind what is
        written, to be seen and overwritten later."""
        before = [0] * len(lanes) if drafted is None else drafted
        step = Step(
            token_ids=np.array([token for part in tokens for token in part], np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            past_lens=np.array(
                [lane.num_written + count for lane, count in zip(lanes, before, strict=True)], np.int32
            ),
            new_lens=np.array([len(part) for part in tokens], np.int32),
            block_tables=[lane.table for lane in lanes],
            logit_rows=rows,
            hidden_rows=rows,
            masks=masks,
        )
        return self._layer.run(step, np.concatenate(features))


def _frontiers(rows: Sequence[Rows]) -> Ints:
    """The frontiers of trees that are laid one after another, as rows of the step."""
    start, found = 0, []
    for row in rows:
        found += [start + place for place in row.frontier]
        start += len(row.tokens)
    return np.array(found, np.int32)
