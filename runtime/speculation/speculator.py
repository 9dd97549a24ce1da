"""Speculation as the engine loop sees it: put drafts on a plan, and learn from what became of them."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qtool.runtime.engines.contract import Floats
from qtool.runtime.events import DraftLength, SpeculationDone
from qtool.runtime.next_token import Extension
from qtool.runtime.request import SequenceState
from qtool.runtime.scheduler import Chunk, Plan, Scheduler
from qtool.runtime.speculation.constrained import allowed_length
from qtool.runtime.speculation.contract import EMPTY, Draft, Drafter, DraftRequest, Seen
from qtool.runtime.speculation.decide import (
    CAUTIOUS,
    HOPEFUL,
    MARGIN,
    Acceptance,
    Allotment,
    StepTimes,
    allot,
)
from qtool.runtime.speculation.worth import Worth
from qtool.runtime.steptime import StepLoad

_MEMORY = 100
_OWN_MEMORY = 12
_PROBING = 0.01
"""Share of the time that may go into drafting where it should not pay, to see whether it does by now."""
_PROBED_TOKENS = 2
_TIMED_EVERY = 8
"""Of steps that nothing is looked for in, how often one's time is taken in, which takes some itself."""
_PLAIN_EVERY = 64
"""Of steps with drafts, how often one has none, so that their time stays known."""


@dataclass
class _Option:
    """A draft that a sequence may get: one in hand, or one that has yet to be made."""

    drafter: Drafter
    draft: Draft | None
    rates: list[float]


@dataclass
class _Shadow:
    """A draft that is not verified: its tokens are compared with those that the sequence gets.

    Another one is made when this one is judged, as if it had been verified. A draft at every token would say
    too much good of itself: where text is copied, most tokens stand in the middle of what is copied.
    """

    start: int
    draft: Draft
    drafter: str
    num_judged: int = 0
    """Of its tokens, those that what the sequence got has been compared with."""


@dataclass
class _Record:
    """What is known of one sequence."""

    acceptance: dict[tuple[str, int], Acceptance] = field(
        default_factory=lambda: defaultdict(lambda: Acceptance(_OWN_MEMORY))
    )
    """By drafter and kind of draft."""
    shadow: _Shadow | None = None


class Speculator:
    """Drafts for the sequences that decode, as many as should pay. Called in the loop's thread.

    Drafters that cost nothing (`expected_ms` 0) propose at every step, and their proposals are compared with
    what comes even where they are not verified: so they are tried at no cost while the machine is busy. Of
    the others one is asked, where it should pay, and rarely to see whether it would. Where all that takes too
    much beside a step, and brings too little, most steps go without a look (`Worth`).
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        times: StepTimes | None,
        vocab_size: int,
        *,
        num_tokens: int | None = None,
        block_verification: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`times` and `vocab_size` are the target's. `num_tokens` fixes the length of drafts; None decides by
        `times` and what is accepted."""
        assert num_tokens is not None or times is not None
        self.drafters = list(drafters)
        self.times = times
        self.block_verification = block_verification
        self._wants_hidden = any(drafter.wants_hidden for drafter in drafters)
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._clock = clock
        self._overall: dict[tuple[str, int], Acceptance] = {}
        self._records: dict[int, _Record] = {}
        self._owners: dict[int, Drafter] = {}
        """Who drafted, by sequence, in the step that runs."""
        self._last_probe = clock()
        self._probe_ms = 0.0
        """What the last one took, with all that the drafter had to take in first."""
        self._num_drafted = 0
        """Steps with drafts since one had none."""
        self._worth = Worth()
        self._looks = True
        """Whether the step that runs was looked at for drafts."""
        self._num_rested = 0
        """Steps since one was looked at."""
        self._had_room = False
        """Whether any of its sequences might have had a draft."""
        self._drafting_ms = self._asked_ms = self._learning_ms = 0.0
        """What the step's drafts took, of that what drafters took that cost something, and learning."""
        self._is_probe = False
        self._num_rows = self._num_accepted = self._num_decoding = 0
        """Of the step that runs: rows of drafts, those accepted, and sequences that decode."""

    @property
    def wants_hidden(self) -> bool:
        """Whether the step that is drafted for shall give hidden states: not where none looks for drafts.

        A drafter that missed some goes on from those that come next: to compute them again would cost what is
        to be saved.
        """
        return self._looks and self._wants_hidden

    def draft(self, scheduler: Scheduler, plan: Plan) -> float:
        """Put drafts on the plan's chunks that decode; the seconds that it took."""
        start = self._clock()
        for sequence in plan.preempted:
            for drafter in self.drafters:
                drafter.preempted(sequence)
        if plan.copies:
            for drafter in self.drafters:
                drafter.copy_blocks(plan.copies)
        self._owners = {}
        self._asked_ms, self._is_probe = 0.0, False
        self._looks = self._num_tokens is not None or self._worth.allows_look
        if not self._looks:
            return 0.0
        rooms = scheduler.room_for_drafts(plan)
        self._had_room = bool(rooms)
        if rooms:
            self._draft(scheduler, plan, rooms)
        seconds = self._clock() - start
        self._drafting_ms = 1000 * seconds
        if self._is_probe:
            self._probe_ms += 1000 * seconds
        return seconds

    def _draft(self, scheduler: Scheduler, plan: Plan, rooms: Sequence[tuple[int, int]]) -> None:
        sequences = [plan.chunks[place].sequence for place, _ in rooms]
        limits = [room if self._num_tokens is None else min(room, self._num_tokens) for _, room in rooms]
        free = [drafter for drafter in self.drafters if _is_free(drafter, sequences, limits)]
        options = self._free_options(free, sequences, limits)
        if len(free) == len(self.drafters) and not any(options):
            return
        left = scheduler.config.max_num_batched_tokens - sum(chunk.num_rows for chunk in plan.chunks)
        load = plan.load()
        chosen, counts = options, self._allot(load, options, sequences, left)
        for drafter in self.drafters:
            if drafter not in free:
                chosen, counts = self._consider(drafter, chosen, counts, load, sequences, limits, left)
        if self._num_tokens is None and not self._may_draft(any(counts.counts)):
            counts = Allotment([0] * len(chosen), counts.tokens_per_ms)
        drafts = self._make(chosen, counts.counts, sequences)
        for (place, _), option, draft in zip(rooms, chosen, drafts, strict=True):
            sequence = plan.chunks[place].sequence
            if draft and option is not None and scheduler.add_draft(plan, place, draft):
                self._owners[sequence.id] = option.drafter
        for sequence, option in zip(sequences, options, strict=True):
            if option is not None:
                self._cast_shadow(sequence, option)

    def _cast_shadow(self, sequence: SequenceState, option: _Option) -> None:
        """Follow a free draft that is not verified, if it is a chain that was not drawn."""
        record, draft = self._record(sequence), option.draft
        if self._owners.get(sequence.id) is option.drafter:
            record.shadow = None
        elif record.shadow is None and draft is not None and draft.parents is None and draft.probs is None:
            record.shadow = _Shadow(len(sequence.tokens), draft, option.drafter.name)

    def _may_draft(self, wanted: bool) -> bool:
        """Whether a step gets the drafts that are wanted: now and then none, so that both can be compared."""
        self._num_drafted = self._num_drafted + 1 if wanted else 0
        if self._num_drafted <= _PLAIN_EVERY:
            return wanted
        self._num_drafted = 0
        return False

    def _free_options(
        self, free: Sequence[Drafter], sequences: Sequence[SequenceState], limits: Sequence[int]
    ) -> list[_Option | None]:
        """The best proposal for each sequence among those that cost nothing."""
        best: list[_Option | None] = [None] * len(sequences)
        for drafter in free:
            requests = _requests(drafter, sequences, limits)
            for place, draft in enumerate(drafter.propose(requests)):
                draft = self._followable(draft, sequences[place])
                if not draft:
                    continue
                key = drafter.name, draft.kind
                rates = self._rates(key, CAUTIOUS, self._record(sequences[place]), len(draft))
                option = _Option(drafter, draft, rates)
                best[place] = _better(best[place], option)
        return best

    def _followable(self, draft: Draft, sequence: SequenceState) -> Draft:
        """The draft without what the sequence's constraint forbids: a deterministic chain may be cut."""
        if sequence.constraint is None or draft.probs is not None or draft.parents is not None:
            return draft
        return draft.shortened(allowed_length(sequence.constraint, draft.tokens, self._vocab_size))

    def _consider(
        self,
        drafter: Drafter,
        chosen: list[_Option | None],
        counts: Allotment,
        load: StepLoad,
        sequences: Sequence[SequenceState],
        limits: Sequence[int],
        left: int,
    ) -> tuple[list[_Option | None], Allotment]:
        """Ask a drafter that costs something instead, for the sequences that it should bring more, where that
        promises more tokens a second."""
        depth = min(drafter.max_tokens, max(limits))
        rates = [
            self._rates((drafter.name, 0), HOPEFUL, self._record(sequence), min(depth, limit))
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        gained = [
            0.0 if option is None else sum(option.rates[:count])
            for option, count in zip(chosen, counts.counts, strict=True)
        ]
        least = counts.tokens_per_ms * (1.0 if any(counts.counts) else MARGIN)
        best = 0
        for tokens in range(1, depth + 1):
            found = self._speed(drafter, tokens, rates, gained, counts.counts, load, sequences, left)
            if found > least:
                best, least = tokens, found
        if self._num_tokens is not None:
            best = depth
        if best:
            asked = [sum(own[:best]) > other for own, other in zip(rates, gained, strict=True)]
            options: list[_Option | None] = [
                _Option(drafter, None, own) if wanted else option
                for option, own, wanted in zip(chosen, rates, asked, strict=True)
            ]
            numbers = [
                min(best, len(own)) if wanted else count
                for count, own, wanted in zip(counts.counts, rates, asked, strict=True)
            ]
            return options, Allotment(numbers, least)
        if any(counts.counts) or self._num_tokens is not None:
            return chosen, counts
        return self._probe(drafter, chosen, counts, load, sequences, limits)

    def _speed(
        self,
        drafter: Drafter,
        tokens: int,
        rates: Sequence[Sequence[float]],
        gained: Sequence[float],
        counts: Sequence[int],
        load: StepLoad,
        sequences: Sequence[SequenceState],
        left: int,
    ) -> float:
        """Tokens a millisecond with drafts of so many tokens for the sequences that gain more by them than
        they do already; 0 where a step can't take them, or none gains."""
        rows, context, expected = 0, 0, float(load.sequences)
        asked = []
        for own, other, count, sequence in zip(rates, gained, counts, sequences, strict=True):
            gain = sum(own[:tokens])
            if gain > other:
                number = min(tokens, len(own))
                asked.append(DraftRequest(sequence, number))
            else:
                number, gain = count, other
            rows += number
            context += number * sequence.num_computed
            expected += gain
        if not asked or rows > left or self.times is None:
            return 0.0
        ms = self.times.step_ms(load.tokens + rows, load.context + context) + self.times.extra_ms
        return expected / (ms + drafter.expected_ms(asked))

    def _probe(
        self,
        drafter: Drafter,
        chosen: list[_Option | None],
        counts: Allotment,
        load: StepLoad,
        sequences: Sequence[SequenceState],
        limits: Sequence[int],
    ) -> tuple[list[_Option | None], Allotment]:
        """Once in a while, try a drafter that should not pay, on the sequence that arrived last."""
        assert self.times is not None
        tokens = min(_PROBED_TOKENS, limits[-1], drafter.max_tokens)
        before = self.times.step_ms(load.tokens, load.context)
        after = self.times.step_ms(load.tokens + tokens, load.context)
        cost = drafter.expected_ms([DraftRequest(sequences[-1], tokens)]) + after - before
        now = self._clock()
        if max(cost, self._probe_ms) > _PROBING * 1000 * (now - self._last_probe):
            return chosen, counts
        self._last_probe, self._probe_ms, self._is_probe = now, after - before, True
        probed = [*chosen[:-1], _Option(drafter, None, [1.0] * tokens)]
        return probed, Allotment([*counts.counts[:-1], tokens], counts.tokens_per_ms)

    def _allot(
        self,
        load: StepLoad,
        options: Sequence[_Option | None],
        sequences: Sequence[SequenceState],
        left: int,
    ) -> Allotment:
        rates: list[list[float]] = [[] if option is None else option.rates for option in options]
        if self._num_tokens is not None or self.times is None:
            return Allotment([len(own) for own in rates], float(sum(map(sum, rates))))
        if not any(rates):
            speed = load.sequences / self.times.step_ms(load.tokens, load.context)
            return Allotment([0] * len(options), speed)
        pasts = [sequence.num_computed for sequence in sequences]
        return allot(self.times, load, rates, pasts, left)

    def _make(
        self,
        options: Sequence[_Option | None],
        counts: Sequence[int],
        sequences: Sequence[SequenceState],
    ) -> list[Draft]:
        """The drafts that were decided on."""
        drafts = [EMPTY] * len(options)
        wanted: dict[str, list[int]] = defaultdict(list)
        for place, (option, count) in enumerate(zip(options, counts, strict=True)):
            if option is None or not count:
                continue
            if option.draft is None:
                wanted[option.drafter.name].append(place)
            else:
                drafts[place] = option.draft.shortened(count)
        for drafter in self.drafters:
            places = wanted.get(drafter.name, [])
            requests = [DraftRequest(sequences[place], counts[place]) for place in places]
            if not requests:
                continue
            start = self._clock()
            for place, draft in zip(places, drafter.propose(requests), strict=True):
                drafts[place] = draft
            self._asked_ms += 1000 * (self._clock() - start)
        return drafts

    def _rates(self, key: tuple[str, int], guess: float, record: _Record, count: int) -> list[float]:
        """Of drafts of one drafter and kind for one sequence."""
        own = record.acceptance.get(key)
        overall = self._overall.setdefault(key, Acceptance(_MEMORY, guess)).rates(count)
        return overall if own is None else own.rates(count, overall)

    def _record(self, sequence: SequenceState) -> _Record:
        return self._records.setdefault(sequence.id, _Record())

    def learn(
        self,
        chunks: Sequence[Chunk],
        extensions: Sequence[Extension | None],
        hidden: Floats | None,
        drafting_seconds: float,
    ) -> SpeculationDone:
        """Take in what a step made of its drafts, when tokens are appended and committed, and before what
        ended is forgotten. `hidden` [T, F] are the states of all rows of the step, where they are wanted."""
        lengths = [
            _length(chunk, extension)
            for chunk, extension in zip(chunks, extensions, strict=True)
            if extension is not None and chunk.sequence.num_generated > len(extension.chosen)
        ]
        if not self._looks:
            return SpeculationDone(drafting_seconds, lengths=lengths)
        start = self._clock()
        drafted: list[int] = []
        accepted: list[int] = []
        seen: list[Seen] = []
        row = 0
        for chunk, extension in zip(chunks, extensions, strict=True):
            sequence, draft = chunk.sequence, chunk.draft
            path = [] if extension is None else extension.accepted
            states = None
            if hidden is not None:
                end = row + chunk.num_new
                states = hidden[[*range(row, end), *(end + place for place in path)]]
            seen.append(Seen(sequence, chunk.num_new + len(path), states))
            row += chunk.num_rows
            if draft:
                _count(drafted, range(len(draft)))
                _count(accepted, path)
                self._judge(sequence, draft, path)
            record = self._records.get(sequence.id)
            if record is not None and record.shadow is not None:
                record.shadow = self._followed(record.shadow, record, sequence.tokens)
        for drafter in self.drafters:
            drafter.observe(seen)
        self._num_rows, self._num_accepted, self._num_decoding = sum(drafted), sum(accepted), len(lengths)
        self._learning_ms = 1000 * (self._clock() - start)
        return SpeculationDone(drafting_seconds, drafted, accepted, lengths)

    def note_times(self, load: StepLoad, seconds: float, engine_seconds: float) -> None:
        """Take in what the step took that was drafted for and learned from, in all and in the engine."""
        if self.times is None:
            return
        looking_ms = self._drafting_ms + self._learning_ms if self._looks else 0.0
        ms, engine_ms = 1000 * seconds, 1000 * engine_seconds
        self._worth.pass_time(ms)
        self._num_rested = 0 if self._looks else self._num_rested + 1
        if self._num_rested % _TIMED_EVERY:
            return
        rows = self._num_rows if self._looks else 0
        self.times.update(load, engine_ms)
        self.times.note_outside(max(ms - engine_ms - looking_ms, 0.0), rows > 0)
        if not self._looks or not self._had_room or self._is_probe:
            return
        saved_ms = 0.0
        if rows:
            plain_ms = self.times.step_ms(load.tokens - rows, load.context)
            drafted_ms = self.times.step_ms(load.tokens, load.context) + self.times.extra_ms
            gained = self._num_accepted / max(self._num_decoding, 1)
            saved_ms = (1 + gained) * plain_ms - drafted_ms - self._asked_ms
        self._worth.looked(looking_ms - self._asked_ms, saved_ms)

    def _judge(self, sequence: SequenceState, draft: Draft, path: Sequence[int]) -> None:
        sequence.num_accepted += len(path)
        sequence.num_rejected += len(draft) - len(path)
        key = self._owners[sequence.id].name, draft.kind
        self._overall.setdefault(key, Acceptance(_MEMORY)).update(len(draft), path)
        self._record(sequence).acceptance[key].update(len(draft), path)

    def _followed(self, shadow: _Shadow, record: _Record, tokens: Sequence[int]) -> _Shadow | None:
        """Judge a shadow as far as the tokens are known; None when it is judged to its end."""
        draft, key = shadow.draft, (shadow.drafter, shadow.draft.kind)
        acceptances = self._overall[key], record.acceptance[key]
        for place in range(shadow.num_judged, min(len(draft), len(tokens) - shadow.start)):
            right = draft.tokens[place] == tokens[shadow.start + place]
            for acceptance in acceptances:
                for judged in [place] if right else range(place, len(draft)):
                    acceptance.note(judged, right)
            if not right:
                return None
        shadow.num_judged = len(tokens) - shadow.start
        return shadow if shadow.num_judged < len(draft) else None

    def forget(self, sequence: SequenceState) -> None:
        """The sequence is gone."""
        self._records.pop(sequence.id, None)
        for drafter in self.drafters:
            drafter.forget(sequence)


def _length(chunk: Chunk, extension: Extension) -> DraftLength:
    num_tokens = len(extension.chosen) - (extension.chosen[-1].token is None)
    return DraftLength(len(chunk.draft), len(extension.accepted), num_tokens)


def _is_free(drafter: Drafter, sequences: Sequence[SequenceState], limits: Sequence[int]) -> bool:
    return drafter.expected_ms(_requests(drafter, sequences, limits)) == 0


def _requests(
    drafter: Drafter, sequences: Sequence[SequenceState], limits: Sequence[int]
) -> list[DraftRequest]:
    return [
        DraftRequest(sequence, min(limit, drafter.max_tokens))
        for sequence, limit in zip(sequences, limits, strict=True)
    ]


def _better(left: _Option | None, right: _Option) -> _Option:
    return right if left is None or sum(right.rates) > sum(left.rates) else left


def _count(counts: list[int], places: Sequence[int]) -> None:
    for place in places:
        while len(counts) <= place:
            counts.append(0)
        counts[place] += 1
