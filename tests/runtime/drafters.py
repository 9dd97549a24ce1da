"""Drafters for tests: one that knows what comes, one that guesses, one that draws."""

from collections.abc import Callable, Sequence

import numpy as np

from qtool.runtime.request import SequenceState
from qtool.runtime.speculation.contract import EMPTY, ROOT, Draft, DraftRequest, Seen
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.steptime import StepLoad

Guess = Callable[[np.random.Generator, DraftRequest], Draft]


class Steady(StepTimes):
    """Step times that are as they were said to be, whatever the fake engine's steps take."""

    def update(self, load: StepLoad, ms: float) -> None:
        pass


class ScriptedDrafter:
    """Proposes what a function makes up, and keeps count of what it is told."""

    wants_hidden = False

    def __init__(self, guess: Guess, *, seed: int = 0, max_tokens: int = 6, ms: float = 0.0) -> None:
        """`ms` is what a draft is said to cost."""
        self.name = "scripted"
        self.max_tokens = max_tokens
        self.num_proposed = 0
        self.known: set[int] = set()
        """Sequences that it was told of and that have not ended."""
        self._guess = guess
        self._ms = ms
        self._generator = np.random.default_rng(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [self._guess(self._generator, request) for request in requests]
        self.num_proposed += sum(map(len, drafts))
        self.known |= {request.sequence.id for request in requests}
        return drafts

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        return self._ms

    def observe(self, seen: Sequence[Seen]) -> None:
        for one in seen:
            assert 0 < one.num_tokens <= one.sequence.num_computed <= len(one.sequence.tokens)
            self.known.add(one.sequence.id)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert copies

    def preempted(self, sequence: SequenceState) -> None:
        assert sequence.num_computed == 0

    def forget(self, sequence: SequenceState) -> None:
        self.known.discard(sequence.id)


def rubbish(vocab_size: int, *, trees: bool = False) -> Guess:
    """Random tokens: as many as are wanted, fewer, or none."""

    def guess(generator: np.random.Generator, request: DraftRequest) -> Draft:
        count = int(generator.integers(0, request.num_tokens + 1))
        return _tree(generator, generator.permutation(vocab_size)[:count].tolist(), trees)

    return guess


def knowing(
    answer: Callable[[Sequence[int], int], Sequence[int]],
    vocab_size: int,
    right: float,
    *,
    trees: bool = False,
) -> Guess:
    """What `answer` says will follow a text, each token wrong with probability 1 - `right`.

    In a tree the true path lies somewhere among wrong tokens.
    """

    def guess(generator: np.random.Generator, request: DraftRequest) -> Draft:
        true = list(answer(request.sequence.tokens, request.num_tokens))
        if not trees:
            wrong = generator.random(len(true)) > right
            return Draft(
                [(token + 1) % vocab_size if bad else token for token, bad in zip(true, wrong, strict=True)]
            )
        tokens: list[int] = []
        parents: list[int] = []
        place, depth = ROOT, 0
        while len(tokens) < request.num_tokens:
            siblings = [tokens[child] for child, parent in enumerate(parents) if parent == place]
            if generator.random() < right and true[depth] not in siblings:
                tokens.append(true[depth])
                parents.append(place)
                place, depth = len(tokens) - 1, depth + 1
            else:
                other = next(
                    t for t in generator.permutation(vocab_size).tolist() if t not in [*siblings, true[depth]]
                )
                tokens.append(other)
                parents.append(place)
        return Draft(tokens, parents)

    return guess


def _tree(generator: np.random.Generator, tokens: list[int], trees: bool) -> Draft:
    if not tokens:
        return EMPTY
    if not trees:
        return Draft(tokens)
    return Draft(tokens, [int(generator.integers(ROOT, place)) for place in range(len(tokens))])


def drawing(q: Callable[[Sequence[int]], np.ndarray], *, width: int = 1) -> Guess:
    """Draws from q of a text; at every place `width` tokens without replacement, the first goes on."""

    def guess(generator: np.random.Generator, request: DraftRequest) -> Draft:
        if request.deterministic:
            return EMPTY
        text = list(request.sequence.tokens)
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[np.ndarray] = []
        place = ROOT
        while len(tokens) + width <= request.num_tokens:
            own = q(text).astype(np.float32)
            found = generator.choice(
                len(own), width, replace=False, p=own.astype(np.float64) / own.sum(dtype=np.float64)
            )
            tokens += found.tolist()
            parents += [place] * width
            probs += [own] * width
            place = len(tokens) - width
            text.append(int(found[0]))
        if not tokens:
            return EMPTY
        return Draft(tokens, None if width == 1 else parents, probs)

    return guess
