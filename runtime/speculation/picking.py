"""Which drafter drafts how many tokens for each sequence of a step: what should give most tokens a second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from qtool.runtime.request import SequenceState
from qtool.runtime.speculation.constrained import allowed_length
from qtool.runtime.speculation.contract import Draft, Drafter, DraftRequest
from qtool.runtime.speculation.decide import CAUTIOUS, HOPEFUL, Allotment, StepTimes, allot, margin
from qtool.runtime.speculation.records import Records
from qtool.runtime.steptime import StepLoad

_PROBING = 0.003
"""Share of the time that may go into drafting where it should not pay, to see whether it does by now."""
_PROBED_TOKENS = 2
_PLAIN_EVERY = 64
"""Of steps with drafts, how often one has none, so that their time stays known."""


@dataclass(frozen=True)
class Option:
    """A draft that a sequence may get: one in hand, or one that has yet to be made."""

    drafter: Drafter
    draft: Draft | None
    rates: list[float]


@dataclass(frozen=True)
class Candidates:
    """The sequences of a step that may have a draft."""

    sequences: Sequence[SequenceState]
    limits: Sequence[int]
    """Tokens of each one's draft, at most."""
    load: StepLoad
    """The step's, without drafts."""
    decoding: StepLoad
    """Of that, what sequences that decode have."""
    rows_left: int
    """That it may have beside."""


@dataclass(frozen=True)
class Pick:
    """What was decided for each sequence."""

    proposed: list[Option | None]
    """The best that drafters which cost nothing have proposed."""
    options: list[Option | None]
    allotment: Allotment
    is_probe: bool = False
    """Whether a drafter is tried that should not pay."""

    @property
    def counts(self) -> list[int]:
        """Tokens of each draft."""
        return self.allotment.counts


class Picker:
    """Drafters that cost nothing have proposed already; of the others one is asked instead, where that
    promises more, and now and then to see whether it would."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        times: StepTimes | None,
        records: Records,
        vocab_size: int,
        num_tokens: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._drafters, self._times, self._records = drafters, times, records
        self._vocab_size, self._num_tokens, self._clock = vocab_size, num_tokens, clock
        self._last_probe = clock()
        self._probe_ms = 0.0
        """What the last one took, with all that the drafter had to take in first."""
        self._num_drafted = 0
        """Steps with drafts since one had none."""

    def pick(self, step: Candidates) -> Pick | None:
        """Decide; None where there is nothing to decide."""
        free = [d for d in self._drafters if d.expected_ms(_requests(d, step)) == 0]
        proposed = self._proposed(free, step)
        costly = [drafter for drafter in self._drafters if drafter not in free]
        if not costly and not any(proposed):
            return None
        pick = Pick(proposed, proposed, self._allot(step, proposed))
        for drafter in costly:
            pick = self._consider(drafter, pick, step)
        if self._num_tokens is None and not self._may_draft(any(pick.counts)):
            none = Allotment([0] * len(proposed), pick.allotment.tokens_per_ms)
            return replace(pick, allotment=none, is_probe=False)
        return pick

    def note_probe(self, ms: float) -> None:
        """The drafts of a step that was a probe took so long."""
        self._probe_ms += ms

    def _proposed(self, free: Sequence[Drafter], step: Candidates) -> list[Option | None]:
        """The best proposal for each sequence among those that cost nothing."""
        best: list[Option | None] = [None] * len(step.sequences)
        for drafter in free:
            for place, draft in enumerate(drafter.propose(_requests(drafter, step))):
                draft = self._followable(draft, step.sequences[place])
                if not draft:
                    continue
                key = drafter.name, draft.kind
                rates = self._records.rates(key, CAUTIOUS, step.sequences[place], len(draft))
                best[place] = _better(best[place], Option(drafter, draft, rates))
        return best

    def _may_draft(self, wanted: bool) -> bool:
        """Whether a step gets the drafts that are wanted: now and then none, so that both can be compared."""
        self._num_drafted = self._num_drafted + 1 if wanted else 0
        if self._num_drafted <= _PLAIN_EVERY:
            return wanted
        self._num_drafted = 0
        return False

    def _followable(self, draft: Draft, sequence: SequenceState) -> Draft:
        """The draft without what the sequence's constraint forbids: a deterministic chain may be cut."""
        if sequence.constraint is None or draft.probs is not None or draft.parents is not None:
            return draft
        return draft.shortened(allowed_length(sequence.constraint, draft.tokens, self._vocab_size))

    def _allot(self, step: Candidates, options: Sequence[Option | None]) -> Allotment:
        rates: list[list[float]] = [[] if option is None else option.rates for option in options]
        if self._num_tokens is not None or self._times is None:
            return Allotment([len(own) for own in rates], float(sum(map(sum, rates))))
        if not any(rates):
            speed = step.decoding.sequences / self._step_ms(step, 0.0, 0.0)
            return Allotment([0] * len(options), speed)
        pasts = [sequence.num_computed for sequence in step.sequences]
        return allot(self._times, step.load, step.decoding, rates, pasts, step.rows_left)

    def _consider(self, drafter: Drafter, pick: Pick, step: Candidates) -> Pick:
        """Ask a drafter that costs something instead, for the sequences that it should bring more, where that
        promises more tokens a second."""
        depth = min(drafter.max_tokens, max(step.limits))
        rates = [
            self._records.rates((drafter.name, 0), HOPEFUL, sequence, min(depth, limit))
            for sequence, limit in zip(step.sequences, step.limits, strict=True)
        ]
        gained = [
            0.0 if option is None else sum(option.rates[:count])
            for option, count in zip(pick.options, pick.counts, strict=True)
        ]
        least = pick.allotment.tokens_per_ms * (1.0 if any(pick.counts) else margin(step.decoding))
        best = 0
        for tokens, speed in enumerate(self._speeds(drafter, depth, rates, gained, pick.counts, step), 1):
            if speed > least:
                best, least = tokens, speed
        if self._num_tokens is not None:
            best = depth
        if best:
            asked = [sum(own[:best]) > other for own, other in zip(rates, gained, strict=True)]
            options: list[Option | None] = [
                Option(drafter, None, own) if wanted else option
                for option, own, wanted in zip(pick.options, rates, asked, strict=True)
            ]
            counts = [
                min(best, len(own)) if wanted else count
                for count, own, wanted in zip(pick.counts, rates, asked, strict=True)
            ]
            return replace(pick, options=options, allotment=Allotment(counts, least), is_probe=False)
        if any(pick.counts) or self._num_tokens is not None:
            return pick
        return self._probe(drafter, pick, step)

    def _speeds(
        self,
        drafter: Drafter,
        depth: int,
        rates: Sequence[Sequence[float]],
        gained: Sequence[float],
        counts: Sequence[int],
        step: Candidates,
    ) -> list[float]:
        """Tokens a millisecond with drafts of 1 to `depth` tokens for the sequences that gain more by them
        than they do already; 0 where a step can't take them, none gains, or prompts would wait for them."""
        if self._times is None:
            return [0.0] * depth
        made = [self._records.num_made((drafter.name, 0), tokens) for tokens in range(depth + 1)]
        gains = [list(accumulate(own, initial=0.0)) for own in rates]
        plain_ms = self._step_ms(step, 0.0, 0.0)
        slowest_ms = plain_ms + self._times.most_delay_ms(step.load, step.decoding)
        speeds = []
        for tokens in range(1, depth + 1):
            most, rows, context, expected = 0, 0.0, 0.0, float(step.decoding.sequences)
            asked = []
            for own, other, count, sequence in zip(gains, gained, counts, step.sequences, strict=True):
                number, num_rows, gain = count, float(count), other
                drafted = min(tokens, len(own) - 1)
                if own[drafted] > other:
                    number, num_rows, gain = drafted, made[drafted], own[drafted]
                    asked.append(DraftRequest(sequence, drafted))
                most += number
                rows += num_rows
                context += num_rows * sequence.num_computed
                expected += gain
            if not asked or most > step.rows_left:
                speeds.append(0.0)
                continue
            ms = self._step_ms(step, rows, context) + self._times.extra_ms + drafter.expected_ms(asked)
            speeds.append(expected / ms if ms <= slowest_ms else 0.0)
        return speeds

    def _step_ms(self, step: Candidates, rows: float, context: float) -> float:
        """What the step takes with so much more, and with what is charged for other rows than the last one's;
        without the prompts beside it."""
        assert self._times is not None
        rows, context = step.load.tokens + rows, step.load.context + context
        beside_ms = self._times.beside_ms(step.load, step.decoding)
        return self._times.step_ms(rows, context) + self._times.change_of(rows) - beside_ms

    def _probe(self, drafter: Drafter, pick: Pick, step: Candidates) -> Pick:
        """Once in a while, try a drafter that should not pay, on the sequence that arrived last; not while
        prompts wait for their first token."""
        assert self._times is not None
        if step.load != step.decoding:
            return pick
        tokens = min(_PROBED_TOKENS, step.limits[-1], drafter.max_tokens)
        before = self._times.step_ms(step.load.tokens, step.load.context)
        after = self._times.step_ms(step.load.tokens + tokens, step.load.context) + self._times.extra_ms
        verifying = after - before + 2 * self._times.change_ms  # to other rows and back
        cost = drafter.expected_ms([DraftRequest(step.sequences[-1], tokens)]) + verifying
        now = self._clock()
        if max(cost, self._probe_ms) > _PROBING * 1000 * (now - self._last_probe):
            return pick
        self._last_probe, self._probe_ms = now, verifying
        probed = [*pick.options[:-1], Option(drafter, None, [1.0] * tokens)]
        counts = [*pick.counts[:-1], tokens]
        allotment = Allotment(counts, pick.allotment.tokens_per_ms)
        return replace(pick, options=probed, allotment=allotment, is_probe=True)


def _requests(drafter: Drafter, step: Candidates) -> list[DraftRequest]:
    return [
        DraftRequest(sequence, min(limit, drafter.max_tokens))
        for sequence, limit in zip(step.sequences, step.limits, strict=True)
    ]


def _better(left: Option | None, right: Option) -> Option:
    return right if left is None or sum(right.rates) > sum(left.rates) else left
