"""Drafts by a second, smaller model with the same vocabulary."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qtool.errors import UsageError
from qtool.runtime.blocks import BlockManager
from qtool.runtime.engines.contract import Engine, Floats, Step
from qtool.runtime.logits import adjusted
from qtool.runtime.request import SequenceState
from qtool.runtime.sampling import distribution
from qtool.runtime.speculation.constrained import Walk
from qtool.runtime.speculation.contract import EMPTY, Draft, DraftRequest, Seen
from qtool.runtime.speculation.decide import CHANGE_SHARE, StepTimes
from qtool.runtime.tokenizer import Tokenizer

MAX_TOKENS = 8
_CATCH_UP = 256
"""Tokens of texts that a call takes in before it drafts; what lags behind by more gets no draft yet."""
_SPREAD = 32
"""Drafts over which the cost of catching up is spread, when they are weighed."""
_RATE = 0.1


@dataclass
class _Lane:
    """One sequence in the draft model's pool."""

    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens of the sequence that are in the pool."""
    num_published: int = 0
    """Leading blocks that its prefix cache knows of."""
    drafted: list[int] = field(default_factory=list)
    """Tokens in the pool behind those, which the sequence may have got or not."""
    owed_ms: float = 0.0
    """Of what catching up took, what drafts to come have to bring."""

    def settle(self, tokens: Sequence[int], num_again: int) -> None:
        """Count the drafts that became the sequence's; its last `num_again` tokens are computed again in any
        case."""
        for token in self.drafted:
            if self.num_computed < len(tokens) and tokens[self.num_computed] == token:
                self.num_computed += 1
            else:
                break
        self.drafted = []
        self.num_computed = max(min(self.num_computed, len(tokens) - num_again), 0)


@dataclass
class _Drafting:
    """A draft that is being made."""

    request: DraftRequest
    lane: _Lane
    walk: Walk
    logits: Floats
    """[V], of the token that comes next."""
    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    ended: bool = False

    def last(self, count: int) -> list[int]:
        """The last tokens of the text and the draft together."""
        return [*self.request.sequence.tokens[-count:], *self.tokens][-count:]

    def draft(self) -> Draft:
        return Draft(self.tokens, probs=None if self.request.deterministic else self.probs)


class DraftModel:
    """A chain of tokens, each chosen by the draft model as the request's rules say (speculative sampling,
    Leviathan et al. 2023; Chen et al. 2023).

    Penalties, masks and the request's grammar change its logits as they do the target's. It has a pool and a
    prefix cache of its own; where that is full, the sequences that were drafted for longest ago make room.
    """

    name = "draft"
    wants_hidden = False

    def __init__(
        self,
        engine: Engine,
        times: StepTimes,
        vocab_size: int,
        *,
        max_tokens: int = MAX_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`times` are the engine's; `vocab_size` is the target's, which may be padded otherwise."""
        self.max_tokens = max_tokens
        self._engine = engine
        self._times = times
        self._vocab_size = vocab_size
        self._clock = clock
        self._blocks = BlockManager(engine.num_blocks, engine.block_size)
        self._lanes: dict[int, _Lane] = {}
        """By sequence, those that were drafted for last at the end."""
        self._pace = 1.0
        """What drafts take over what was expected."""
        self._generator = np.random.default_rng()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Take in what the texts have become, then draft token by token, for all requests together."""
        start, expected = self._clock(), self._drafting_ms(requests)
        lags = any(self._lag(request.sequence) for request in requests)
        catching_up_ms = self._catching_up_ms(requests)
        drafts: list[Draft] = [EMPTY] * len(requests)
        num_again = self._num_again(len(requests))
        ready = self._catch_up(requests, num_again)
        working = [drafting for drafting in ready if drafting is not None]
        try:
            while working:
                for drafting in working:
                    self._choose(drafting)
                working = [drafting for drafting in working if not drafting.ended]
                if working:
                    self._advance(working, num_again)
        finally:
            for each in ready:
                if each is not None:
                    each.walk.back()
        for place, made in enumerate(ready):
            if made is not None:
                drafts[place] = made.draft()
        for request in requests:
            lane = self._lanes[request.sequence.id]
            lane.owed_ms += catching_up_ms / len(requests)
            lane.owed_ms -= lane.owed_ms / _SPREAD
        if not lags:  # a text's first draft, or a try after a while, says nothing of what a draft takes
            self._pace += _RATE * ((self._clock() - start) * 1000 / max(expected, 1e-3) - self._pace)
        return drafts

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        """Steps of the draft model, one for each token of the longest draft; catching up is spread."""
        lanes = [self._lanes.get(request.sequence.id) for request in requests]
        owed_ms = self._catching_up_ms(requests) + sum(lane.owed_ms for lane in lanes if lane is not None)
        return self._pace * (self._drafting_ms(requests) + owed_ms / _SPREAD)

    def _drafting_ms(self, requests: Sequence[DraftRequest]) -> float:
        """What drafts take where nothing is to catch up with."""
        longest = max(request.num_tokens for request in requests)
        again = self._num_again(len(requests))
        rows = len(requests) * np.array([again, 2], np.float64)
        step, first = self._times.predict_ms(rows, np.full(2, _context(requests))).tolist()
        changes = 2 * self._times.change_ms if again == 1 and longest > 1 else 0.0
        if not changes and any(self._lag(request.sequence) for request in requests):
            # its first step has other rows than the one before and the one behind
            changes = CHANGE_SHARE * min(longest, 2) * self._times.change_ms
        return float(first + (longest - 1) * step + changes)

    def _catching_up_ms(self, requests: Sequence[DraftRequest]) -> float:
        """What it takes beyond that to take in the texts."""
        lag = min(sum(self._lag(request.sequence) for request in requests), _CATCH_UP)
        rows = np.array([lag + len(requests), 2 * len(requests)], np.float64)
        behind, first = self._times.predict_ms(rows, np.full(2, _context(requests))).tolist()
        return max(float(behind - first), 0.0)

    def _num_again(self, num_sequences: int) -> int:
        """Tokens of a sequence that every step computes: two, of which the first was computed before, where a
        step takes longer for another number of rows than for twice as many. Catching up takes two mostly."""
        rows = np.array([num_sequences, 2 * num_sequences], np.float64)
        single, double = self._times.predict_ms(rows, np.zeros(2)).tolist()
        return 2 if double - single < self._times.change_ms else 1

    def _lag(self, sequence: SequenceState) -> int:
        """Tokens that it would have to compute before it can draft, but for the last two."""
        lane = self._lanes.get(sequence.id)
        known = 0 if lane is None else lane.num_computed + len(lane.drafted)
        return max(len(sequence.tokens) - known - 2, 0)

    def observe(self, seen: Sequence[Seen]) -> None:
        """Texts are read when drafts are wanted."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """The target's blocks are not its own."""

    def preempted(self, sequence: SequenceState) -> None:
        """What it has computed holds."""

    def forget(self, sequence: SequenceState) -> None:
        """Free the sequence's blocks."""
        lane = self._lanes.pop(sequence.id, None)
        if lane is not None:
            self._blocks.free(lane.table)

    def _catch_up(self, requests: Sequence[DraftRequest], num_again: int) -> list[_Drafting | None]:
        """Compute the texts as far as they are new; what is ready to draft, for each request."""
        asked = {request.sequence.id for request in requests}
        left, batch = _CATCH_UP, []
        for place, request in enumerate(requests):
            tokens = request.sequence.tokens
            lane = self._lane(request.sequence)
            lane.settle(tokens, num_again)
            num_new = min(len(tokens) - lane.num_computed, left)
            end = lane.num_computed + num_new
            whole = end == len(tokens)
            room = len(tokens) + request.num_tokens if whole else end
            if num_new and room <= self._engine.max_context and self._grow(lane, room, asked):
                left -= num_new
                batch.append((place, lane, tokens[lane.num_computed : end], whole))
        ready: list[_Drafting | None] = [None] * len(requests)
        if not batch:
            return ready
        rows = np.cumsum([len(new) for _, _, new, _ in batch]) - 1
        ends = [row for row, (*_, whole) in zip(rows, batch, strict=True) if whole]
        found = iter(self._run([(lane, lane.num_computed, new) for _, lane, new, _ in batch], ends))
        for place, lane, new, whole in batch:
            sequence = requests[place].sequence
            lane.num_computed += len(new)
            self._publish(lane, sequence)
            if whole:
                ready[place] = _Drafting(requests[place], lane, Walk(sequence.constraint), next(found))
        return ready

    def _choose(self, drafting: _Drafting) -> None:
        """The next token of a draft, and whether it is the last."""
        request, walk, tokens = drafting.request, drafting.walk, drafting.tokens
        sequence, params = request.sequence, request.sequence.params
        row = adjusted(drafting.logits, sequence, tokens)
        best = int(row.argmax())
        if not np.isfinite(row[best]):
            drafting.ended = True
            return
        token = best
        if not request.deterministic:
            drawn = distribution(row, params)
            token = drawn.draw(self._generator)
            drafting.probs.append(drawn.probs())
        walk.accept(token)
        tokens.append(token)
        drafting.ended = len(tokens) == request.num_tokens or token in params.stop_token_ids or walk.ended

    def _advance(self, working: Sequence[_Drafting], num_again: int) -> None:
        """Compute the tokens that were drafted last, `num_again` with those before."""
        new = []
        for drafting in working:
            lane = drafting.lane
            lane.drafted.append(drafting.tokens[-1])
            tokens = drafting.last(num_again)
            new.append((lane, lane.num_computed + len(lane.drafted) - len(tokens), tokens))
        ends = range(num_again - 1, num_again * len(new), num_again)
        for drafting, logits in zip(working, self._run(new, ends), strict=True):
            drafting.logits = logits

    def _run(
        self, new: Sequence[tuple[_Lane, int, Sequence[int]]], logit_rows: Sequence[int]
    ) -> list[Floats]:
        """Compute tokens of lanes from a position on; logits [V] over the target's vocabulary."""
        pasts = [past for _, past, _ in new]
        step = Step(
            token_ids=np.array([token for *_, tokens in new for token in tokens], np.int32),
            positions=np.concatenate([np.arange(past, past + len(tokens)) for _, past, tokens in new]).astype(
                np.int32
            ),
            past_lens=np.array(pasts, np.int32),
            new_lens=np.array([len(tokens) for *_, tokens in new], np.int32),
            block_tables=[lane.table for lane, *_ in new],
            logit_rows=np.array(logit_rows, np.int32),
        )
        logits = self._engine.run(step)
        return [_fitted(row, self._vocab_size) for row in logits]

    def _lane(self, sequence: SequenceState) -> _Lane:
        lane = self._lanes.pop(sequence.id, None)
        if lane is None:
            lane = _Lane()
            found = self._blocks.find_prefix(sequence.tokens, lane.keys, sequence.options.cache_salt)
            found = found[: (len(sequence.tokens) - 1) // self._blocks.block_size]
            if self._blocks.grow(lane.table, len(found) * self._blocks.block_size, found):
                lane.num_published = len(found)
                lane.num_computed = len(found) * self._blocks.block_size
        self._lanes[sequence.id] = lane
        return lane

    def _grow(self, lane: _Lane, num_tokens: int, asked: set[int]) -> bool:
        """Blocks for a lane, taken from sequences that nothing is asked for where there are none."""
        others = (key for key in list(self._lanes) if key not in asked)
        while not self._blocks.grow(lane.table, num_tokens):
            other = next(others, None)
            if other is None:
                return False
            self._blocks.free(self._lanes.pop(other).table)
        return True

    def _publish(self, lane: _Lane, sequence: SequenceState) -> None:
        num_full = lane.num_computed // self._blocks.block_size
        places = range(lane.num_published, num_full)
        self._blocks.publish(lane.table, sequence.tokens, lane.keys, sequence.options.cache_salt, places)
        lane.num_published = max(num_full, lane.num_published)


def _context(requests: Sequence[DraftRequest]) -> float:
    return float(sum(len(request.sequence.tokens) for request in requests))


def _fitted(row: Floats, vocab_size: int) -> Floats:
    """Logits cut to a vocabulary, or padded with tokens that never come."""
    if len(row) >= vocab_size:
        return row[:vocab_size]
    return np.pad(row, (0, vocab_size - len(row)), constant_values=-np.inf)


def refuse_other_vocabulary(target: Tokenizer, path: Path, vocab_size: int) -> None:
    """Raise UsageError unless the tokenizer of the draft model in `path` means the same by every token."""
    draft = Tokenizer.load(path)
    for token_id in range(vocab_size):
        ours, theirs = target.token(token_id), draft.token(token_id)
        if ours != theirs:
            raise UsageError(
                f"{path}: has another vocabulary than the target: token {token_id} is {theirs!r} there and "
                f"{ours!r} in the target; a draft model has to share the target's tokenizer"
            )
