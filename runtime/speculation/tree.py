"""A draft that grows depth by depth: a chain, or EAGLE-2's tree (Li et al. 2024, section 4)."""

import math
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Bools, Floats
from qtool.runtime.speculation.choosing import Chooser
from qtool.runtime.speculation.constrained import Walk
from qtool.runtime.speculation.contract import ROOT, Draft, DraftRequest

_LEAST = math.log(0.06)
"""Of a deterministic draft's probability up to a token: below, verifying it costs more than it brings."""
_LEAST_GROWING = math.log(0.25)
"""The same for drafting what follows it, which costs a run of the head beside."""
_MOST_DEPTH = 6


@dataclass(frozen=True)
class Node:
    """A drafted token."""

    token: int
    parent: int
    """Its place among the nodes, or ROOT."""
    depth: int
    logprob: float
    """Of it and all before it."""
    feature: Floats
    """Of the token before it, [hidden]."""


@dataclass(frozen=True)
class Rows:
    """All nodes of a tree as the rows of a step."""

    tokens: list[int]
    depths: list[int]
    features: Floats
    mask: Bools
    frontier: list[int]
    """Rows that the next depth grows from."""


class Tree:
    """One request's draft under way. `width` tokens follow at each depth, of all that may: those with the
    likeliest paths. With a width of 1 it is a chain, which a grammar walks along."""

    def __init__(self, request: DraftRequest, chooser: Chooser, width: int, *, whole: bool = False) -> None:
        """`whole` takes tokens however unlikely their paths are."""
        self._least, self._least_growing = (-math.inf, -math.inf) if whole else (_LEAST, _LEAST_GROWING)
        constrained = request.sequence.constraint is not None
        self._request, self._chooser = request, chooser
        self._width = 1 if constrained or not request.deterministic else width
        self._walk = Walk(request.sequence.constraint)
        self._nodes: list[Node] = []
        self._probs: list[Floats] = []
        self._frontier: list[int] = []

    @property
    def last(self) -> Node:
        """A chain's last node."""
        return self._nodes[-1]

    @property
    def grows(self) -> bool:
        """Whether another depth is wanted."""
        if not self._frontier:
            return False
        best, count = self._nodes[self._frontier[0]], self._request.num_tokens
        if self._width > 1 and len(self._nodes) >= count:
            kept = sorted((node.logprob for node in self._nodes), reverse=True)[count - 1]
            if best.logprob < max(kept, _LEAST_GROWING):  # what follows is no likelier, and none is missing
                return False
        most = count if self._width == 1 else min(count, _MOST_DEPTH)
        return best.logprob >= self._least_growing and best.depth < most

    def begin(self, logits: Floats, feature: Floats) -> None:
        """The first depth, from what the layer gave of the sequence's last token."""
        self._add([ROOT], logits[None], feature[None])

    def grow(self, logits: Floats, features: Floats) -> None:
        """The next depth, from what the layer gave of the frontier's tokens."""
        self._add(self._frontier, logits, features)

    def rows(self) -> Rows:
        """Every node, for a step that sees the tree as it is."""
        return Rows(
            [node.token for node in self._nodes],
            [node.depth for node in self._nodes],
            np.stack([node.feature for node in self._nodes]),
            Draft([node.token for node in self._nodes], [node.parent for node in self._nodes]).mask()[1:, 1:],
            self._frontier,
        )

    def leave(self) -> None:
        """Take the grammar back to where it was."""
        self._walk.back()

    def draft(self) -> Draft:
        """As many of the nodes as were asked for, those with the likeliest paths."""
        considered = self._request.num_tokens
        if not self._request.deterministic:
            return Draft([node.token for node in self._nodes], probs=self._probs)
        if self._width == 1:
            return Draft([node.token for node in self._nodes], num_considered=considered)
        order = sorted(range(len(self._nodes)), key=lambda place: -self._nodes[place].logprob)
        kept = sorted(order[: self._request.num_tokens])  # a node's parent is likelier: it is kept too
        places = {place: index for index, place in enumerate(kept)} | {ROOT: ROOT}
        nodes = [self._nodes[place] for place in kept]
        parents = [places[node.parent] for node in nodes]
        return Draft([node.token for node in nodes], parents, num_considered=considered)

    def _add(self, parents: list[int], logits: Floats, features: Floats) -> None:
        found: list[Node] = []
        for parent, row, feature in zip(parents, logits, features, strict=True):
            found += self._following(parent, row, feature)
        found = sorted(found, key=lambda node: -node.logprob)[: self._width]
        self._frontier = list(range(len(self._nodes), len(self._nodes) + len(found)))
        self._nodes += found
        if self._width == 1 and found:
            token = found[0].token
            self._walk.accept(token)
            if self._walk.ended or token in self._request.sequence.params.stop_token_ids:
                self._frontier = []

    def _following(self, parent: int, logits: Floats, feature: Floats) -> list[Node]:
        before, depth = (
            (0.0, 1) if parent == ROOT else (self._nodes[parent].logprob, self._nodes[parent].depth + 1)
        )
        drafted = self._path(parent)
        if self._request.deterministic:
            likely = self._chooser.likeliest(logits, self._request, drafted, self._width)
            nodes = [Node(token, parent, depth, before + logprob, feature) for token, logprob in likely]
            return [node for node in nodes if node.logprob >= self._least]
        drawn = self._chooser.draw(logits, self._request, drafted)
        if drawn is None:
            return []
        self._probs.append(drawn[1])
        return [Node(drawn[0], parent, depth, 0.0, feature)]

    def _path(self, place: int) -> list[int]:
        """The tokens from the root to a node."""
        tokens: list[int] = []
        while place != ROOT:
            tokens.append(self._nodes[place].token)
            place = self._nodes[place].parent
        return tokens[::-1]
