"""Speculation as the engine loop sees it: put drafts on a plan, and learn from what became of them."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from qtool.runtime.engines.contract import Floats
from qtool.runtime.events import DraftLength, SpeculationDone
from qtool.runtime.next_token import Extension
from qtool.runtime.request import SequenceState
from qtool.runtime.scheduler import Chunk, Plan, Scheduler
from qtool.runtime.speculation.contract import EMPTY, Draft, Drafter, DraftRequest, Seen
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.picking import Candidates, Pick, Picker
from qtool.runtime.speculation.records import Records
from qtool.runtime.speculation.worth import Worth
from qtool.runtime.steptime import StepLoad

_TIMED_EVERY = 8
"""Of steps that nothing is looked for in, how often one's time is taken in, which takes some itself."""


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
        self._num_tokens = num_tokens
        self._clock = clock
        self._records = Records()
        self._picker = Picker(self.drafters, times, self._records, vocab_size, num_tokens, clock)
        self._owners: dict[int, Drafter] = {}
        """Who drafted, by sequence, in the step that runs."""
        self._worth = Worth()
        self._looks = True
        """Whether the step that runs was looked at for drafts."""
        self._num_rested = 0
        """Steps since one was looked at."""
        self._looks_again = False
        """Whether the next step is looked at in any case: heads draft from what the step before gave."""
        self._had_room = False
        """Whether any of its sequences might have had a draft."""
        self._drafting_ms = self._asked_ms = self._learning_ms = 0.0
        """What the step's drafts took, of that what drafters took that cost something, and learning."""
        self._charged_ms = 0.0
        """Of what those took, what this step has to bring: taking in a text serves later steps, too."""
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
        self._asked_ms = self._charged_ms = 0.0
        self._is_probe = False
        self._looks = self._num_tokens is not None or self._worth.allows_look or self._looks_again
        self._looks_again = self._wants_hidden and self._looks and self._num_rested > 0
        if not self._looks:
            return 0.0
        rooms = scheduler.room_for_drafts(plan)
        self._had_room = bool(rooms)
        if rooms and not self._looks_again:  # heads have nothing to go on from yet
            self._draft(scheduler, plan, rooms)
        seconds = self._clock() - start
        self._drafting_ms = 1000 * seconds
        if self._is_probe:
            self._picker.note_probe(1000 * seconds)
        return seconds

    def _draft(self, scheduler: Scheduler, plan: Plan, rooms: Sequence[tuple[int, int]]) -> None:
        sequences = [plan.chunks[place].sequence for place, _ in rooms]
        limits = [room if self._num_tokens is None else min(room, self._num_tokens) for _, room in rooms]
        left = scheduler.config.max_num_batched_tokens - sum(chunk.num_rows for chunk in plan.chunks)
        step = Candidates(sequences, limits, plan.load(), plan.decoding_load(), left)
        pick = self._picker.pick(step)
        if pick is None:
            return
        self._is_probe = pick.is_probe
        for (place, _), option, draft in zip(rooms, pick.options, self._make(pick, sequences), strict=True):
            if option is None:
                continue
            sequence = plan.chunks[place].sequence
            if not draft:  # none of it was likely enough, or nothing was asked for
                self._records.judge(sequence, (option.drafter.name, draft.kind), draft, [])
            elif scheduler.add_draft(plan, place, draft):
                self._owners[sequence.id] = option.drafter
        for sequence, option in zip(sequences, pick.proposed, strict=True):
            if option is None or option.draft is None:
                continue
            if self._owners.get(sequence.id) is option.drafter:
                self._records.drop_shadow(sequence)
            else:
                self._records.cast_shadow(sequence, (option.drafter.name, option.draft.kind), option.draft)

    def _make(self, pick: Pick, sequences: Sequence[SequenceState]) -> list[Draft]:
        """The drafts that were decided on."""
        drafts = [EMPTY] * len(sequences)
        wanted: dict[str, list[int]] = defaultdict(list)
        for place, (option, count) in enumerate(zip(pick.options, pick.counts, strict=True)):
            if option is None or not count:
                continue
            if option.draft is None:
                wanted[option.drafter.name].append(place)
            else:
                drafts[place] = option.draft.shortened(count)
        for drafter in self.drafters:
            places = wanted.get(drafter.name, [])
            requests = [DraftRequest(sequences[place], pick.counts[place]) for place in places]
            if not requests:
                continue
            start, expected_ms = self._clock(), drafter.expected_ms(requests)
            for place, draft in zip(places, drafter.propose(requests), strict=True):
                drafts[place] = draft
            asked_ms = 1000 * (self._clock() - start)
            self._asked_ms += asked_ms
            self._charged_ms += min(asked_ms, expected_ms)
        return drafts

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
                sequence.num_accepted += len(path)
                sequence.num_rejected += len(draft) - len(path)
                key = self._owners[sequence.id].name, draft.kind
                self._records.judge(sequence, key, draft, path)
            self._records.follow(sequence)
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
        rows = self._num_rows if self._looks else 0
        changed = self.times.note_rows(load.tokens, rows > 0)
        self._worth.pass_time(ms, load.sequences)
        self._num_rested = 0 if self._looks else self._num_rested + 1
        if self._num_rested % _TIMED_EVERY:
            return
        if rows:
            self.times.note_extra(load, ms - looking_ms - changed * self.times.change_ms)
        else:
            self.times.note_outside(max(ms - engine_ms - looking_ms, 0.0))
        if changed and self.times.change_ms:
            self.times.note_change(load, engine_ms)
        else:
            self.times.update(load, engine_ms)
        if not self._looks or not self._had_room or self._is_probe:
            return
        saved_ms = None
        if rows:
            plain_ms = self.times.step_ms(load.tokens - rows, load.context)
            drafted_ms = self.times.step_ms(load.tokens, load.context) + self.times.extra_ms
            drafted_ms += self.times.charge_ms
            # A gained token saves its part of a step that decodes alone, whatever prompts this one took in.
            num_decoding = max(self._num_decoding, 1)
            gained_ms = self._num_accepted / num_decoding * self.times.step_ms(num_decoding, load.context)
            saved_ms = gained_ms + plain_ms - drafted_ms - self._charged_ms
        self._worth.looked(looking_ms - self._asked_ms, saved_ms)

    def forget(self, sequence: SequenceState) -> None:
        """The sequence is gone."""
        self._records.forget(sequence)
        for drafter in self.drafters:
            drafter.forget(sequence)


def _length(chunk: Chunk, extension: Extension) -> DraftLength:
    num_tokens = len(extension.chosen) - (extension.chosen[-1].token is None)
    return DraftLength(len(chunk.draft), len(extension.accepted), num_tokens)


def _count(counts: list[int], places: Sequence[int]) -> None:
    for place in places:
        while len(counts) <= place:
            counts.append(0)
        counts[place] += 1
