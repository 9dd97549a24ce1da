"""How many drafts a step verifies: what they should bring against what they should cost."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.runtime.steptime import StepLoad

Doubles = NDArray[np.float64]

CAUTIOUS, HOPEFUL = 0.25, 0.6
"""Acceptance of a first token that was never tried: of drafts that are judged without being verified, and of
others, which have to be tried to be known."""
GUESS_WEIGHT = 2.0
"""Of what is expected without trying, in drafts."""
_MARGIN, _BATCH_MARGIN = 1.03, 1.1
"""What speculation has to promise, over none, to be used: estimates are noisy, and of a batch more so, whose
steps with drafts have rows of all numbers, few of which were seen lately."""
_MOST_DELAY = 0.03
"""Of a step that takes in prompts, what drafts may add to it: the first token is to come when it came."""
_OWN_RATE = 0.1
_COMMON_RATE = 0.02
_KEPT = 0.995
"""Of what steps with drafts take beyond their rows, at each step without."""
CHANGE_SHARE = 0.5
"""Of what a change of rows costs, what is charged to the step that makes it, as long as little is known of
whether the next ones keep to it."""
_CHANGE_RATE, _CHANGE_FORGOTTEN = 0.05, 0.005
"""How fast that is learned from steps with drafts, and forgotten in those without."""


def margin(decoding: StepLoad) -> float:
    """What drafts have to promise, in tokens a second over none, for a step whose sequences that decode load
    it with so much."""
    return _MARGIN if decoding.sequences == 1 else _BATCH_MARGIN


class Acceptance:
    """How often the token at each place of a draft is accepted; drafts count less with every one after.

    In a chain the rate falls from place to place: a token is accepted only if those before it are. A token
    that was asked for and left out, being unlikely, counts as refused: it brought nothing, and the next one
    that is asked for may be left out too.
    """

    def __init__(self, memory: int, guess: float = CAUTIOUS) -> None:
        """`memory` is how many drafts count, more or less; `guess` is the first place's rate before any."""
        self._keep = 1 - 1 / memory
        self._guess = guess
        self._asked: list[float] = []
        self._made: list[float] = []
        self._accepted: list[float] = []

    def update(self, num_tokens: int, accepted: Sequence[int], num_asked: int = 0) -> None:
        """Take in a draft of so many tokens, of `num_asked` if those are more, and the places of those that
        were accepted."""
        for place in range(max(num_tokens, num_asked)):
            self.note(place, place in accepted, made=place < num_tokens)

    def note(self, place: int, accepted: bool, *, made: bool = True) -> None:
        """Take in what became of one token that was asked for."""
        while len(self._asked) <= place:
            for counts in (self._asked, self._made, self._accepted):
                counts.append(0.0)
        for counts, seen in ((self._asked, True), (self._made, made), (self._accepted, accepted)):
            counts[place] = counts[place] * self._keep + seen

    def num_made(self, count: int) -> float:
        """Of `count` tokens asked for, how many are made: all, as far as is known."""
        known = list(zip(self._made[:count], self._asked[:count], strict=True))
        return sum((made + 1) / (asked + 1) for made, asked in known) + count - len(known)

    def rates(
        self, count: int, expected: Sequence[float] | None = None, weight: float = GUESS_WEIGHT
    ) -> list[float]:
        """The rates at the first `count` places, none above the one before it.

        They lean on the `expected` ones, as on `weight` drafts; without, on what the place before has, times
        the first place's rate.
        """
        rates: list[float] = []
        last, factor = 1.0, self._guess
        for place in range(count):
            guess = last * factor if expected is None else expected[place]
            asked = self._asked[place] if place < len(self._asked) else 0.0
            accepted = self._accepted[place] if place < len(self._accepted) else 0.0
            last = min(last, (accepted + weight * guess) / (asked + weight))
            if place == 0:
                factor = last
            rates.append(last)
        return rates


class StepTimes:
    """Milliseconds of a step by its rows, measured at the start and kept current.

    They are the engine's and, once steps were timed, what is done around them. Kernels make this no straight
    line (some work on eight rows at a time), and the choice of a few rows more or fewer goes by its bends; so
    it is kept as points with lines between. Attention to past tokens adds a linear term.
    """

    def __init__(self, sweep: Sequence[tuple[StepLoad, float]], change_ms: float = 0.0) -> None:
        """`sweep` holds loads and milliseconds; of some numbers of rows, loads with more context too. A step
        takes `change_ms` more than those, when its number of rows is not that of the step before."""
        self.change_ms = change_ms
        self._change_share, self._last_drafted = CHANGE_SHARE, False
        self._last_rows: int | None = None
        least: dict[int, tuple[float, int]] = {}
        for load, ms in sorted(sweep, key=lambda one: one[0].context):
            least.setdefault(load.tokens, (ms, load.context))
        self._rows = sorted(least)
        measured = np.array([least[rows][0] for rows in self._rows], np.float64)
        # More rows take no less, and what disturbs a measurement adds to it.
        self._ms: list[float] = np.minimum.accumulate(measured[::-1])[::-1].tolist()
        self.outside_ms = 0.0
        """Of a step without drafts, outside of the engine: scheduling, sampling, committing."""
        self.extra_ms = 0.0
        """What steps with drafts take beyond that and what is known of their rows: for masks, for slots that
        are moved, for drafts that are taken back."""
        slopes = [
            (ms - least[load.tokens][0]) / (load.context - least[load.tokens][1])
            for load, ms in sweep
            if load.context > least[load.tokens][1]
        ]
        self._per_pair = max(float(np.mean(slopes)), 0.0) if slopes else 0.0

    def predict_ms(self, rows: Doubles, context: Doubles) -> Doubles:
        """Of steps [...] with so many rows and pairs of a row and a token that it attends to."""
        base = np.interp(rows, self._rows, self._ms)
        beyond = np.maximum(rows - self._rows[-1], 0.0)
        return np.asarray(base + beyond * self._last_slope() + self._per_pair * context + self.outside_ms)

    def step_ms(self, rows: float, context: float) -> float:
        """As `predict_ms`, of one step and in a microsecond."""
        below, share = self._between(rows)
        above = min(below + 1, len(self._rows) - 1)
        base = self._ms[below] + share * (self._ms[above] - self._ms[below])
        return float(base + self._per_pair * context + self.outside_ms)

    def beside_ms(self, load: StepLoad, decoding: StepLoad) -> float:
        """Of a step with such a load, what is computed beside the sequences that decode: prompts, which take
        that long in any case, and are nothing that drafts could be cheap beside."""
        if load == decoding:
            return 0.0
        whole, alone = (self.step_ms(one.tokens, one.context) for one in (load, decoding))
        return max(whole - alone, 0.0)

    def most_delay_ms(self, load: StepLoad, decoding: StepLoad) -> float:
        """What drafts may add to a step with such a load: little where prompts wait for their first token."""
        return math.inf if load == decoding else _MOST_DELAY * self.step_ms(load.tokens, load.context)

    def changing_ms(self, rows: Doubles) -> Doubles:
        """What is charged to steps [...] for another number of rows than the last one had."""
        if self._last_rows is None:
            return np.zeros_like(rows)
        return np.where(np.rint(rows) == self._last_rows, 0.0, self.charge_ms)

    def change_of(self, rows: float) -> float:
        """As `changing_ms`, of one step."""
        alike = self._last_rows is None or round(rows) == self._last_rows
        return 0.0 if alike else self.charge_ms

    @property
    def charge_ms(self) -> float:
        """What is charged to a step with drafts for a change of rows, there and back."""
        return self._change_share * self.change_ms

    @property
    def prefers_alike(self) -> bool:
        """Whether two rows more cost less than a number of rows that changes."""
        few, more = self.predict_ms(np.array([2.0, 4.0]), np.zeros(2)).tolist()
        return bool(more - few < self.change_ms)

    def note_rows(self, rows: int, drafted: bool) -> bool:
        """Take in the rows of a step that was run, with drafts or not; whether the last one had others.

        A lone sequence keeps to a number of drafts, which pays a change once. In a batch a step with drafts
        has rows of its own, and the one behind it is back at the old number: two changes.
        """
        changed = self._last_rows is not None and rows != self._last_rows
        self._last_rows = rows
        if drafted:
            self._change_share += _CHANGE_RATE * (changed - self._change_share)
        elif self._last_drafted:
            self._change_share += _CHANGE_RATE * changed
        else:
            self._change_share += _CHANGE_FORGOTTEN * (CHANGE_SHARE - self._change_share)
        self._last_drafted = drafted
        return changed

    def _between(self, rows: float) -> tuple[int, float]:
        """The point below, and how far it is to the next, in its distance: above 1 beyond the last."""
        if len(self._rows) == 1:
            return 0, 0.0
        above = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        width = self._rows[above] - self._rows[above - 1]
        return above - 1, max((rows - self._rows[above - 1]) / width, 0.0)

    def note_outside(self, ms: float) -> None:
        """Take in what a step without drafts took outside of the engine. What drafts add is slowly forgotten
        while there are none, so that they are tried again."""
        usual = self.outside_ms
        more = min(ms, 2 * usual) - usual if usual else ms  # what was held up is not usual
        self.extra_ms *= _KEPT
        self.outside_ms += _OWN_RATE * more if usual else ms

    def note_extra(self, load: StepLoad, ms: float) -> None:
        """Take in what a step with drafts took, in the engine and outside, but for drafting."""
        expected = self.step_ms(load.tokens, load.context)
        more = min(ms - expected, expected) - self.extra_ms  # what was held up is not usual
        self.extra_ms = max(self.extra_ms + _OWN_RATE * more, 0.0)

    def update(self, load: StepLoad, ms: float) -> None:
        """Take in what a step with the rows of the last one took in the engine: mostly where it lies on the
        curve, a little everywhere."""
        below, share = self._between(load.tokens)
        expected = max(self.step_ms(load.tokens, load.context) - self.outside_ms, 1e-6)
        ratio = min(max(ms / expected, 0.25), 4.0)
        common = ratio**_COMMON_RATE
        self._ms = [common * value for value in self._ms]
        self._per_pair *= common
        share = min(share, 1.0)
        self._ms[below] *= ratio ** (_OWN_RATE * (1 - share))
        if len(self._ms) > 1:
            self._ms[below + 1] *= ratio ** (_OWN_RATE * share)

    def note_change(self, load: StepLoad, ms: float) -> None:
        """Take in what a step with other rows than the last one's took in the engine."""
        expected = self.step_ms(load.tokens, load.context) - self.outside_ms
        more = min(max(ms - expected, 0.0), expected)
        self.change_ms += _CHANGE_RATE * (more - self.change_ms)

    def _last_slope(self) -> float:
        if len(self._rows) < 2:
            return float(self._ms[-1]) / self._rows[-1]
        return float(self._ms[-1] - self._ms[-2]) / (self._rows[-1] - self._rows[-2])


@dataclass(frozen=True)
class Allotment:
    """Tokens that each sequence's draft gets, and what the step should bring."""

    counts: list[int]
    tokens_per_ms: float


def allot(
    times: StepTimes,
    load: StepLoad,
    decoding: StepLoad,
    rates: Sequence[Sequence[float]],
    pasts: Sequence[int],
    num_rows: int,
) -> Allotment:
    """Give drafts to the sequences that should gain most by them, as long as tokens a second grow.

    `load` is the step's without drafts, `decoding` what sequences that decode have in it, each of which gets
    a token; what the prompts beside them take is left out of the tokens a second, and drafts hardly delay
    them. `rates` are the acceptance rates of the tokens that each of B sequences might have drafted, falling;
    `pasts` are their lengths; a step takes `num_rows` rows more. None gets any where that promises next to
    nothing.
    """
    owners = np.repeat(np.arange(len(rates)), [len(own) for own in rates])
    gains = np.concatenate([np.asarray(own, np.float64) for own in rates]) if len(rates) else np.empty(0)
    order = np.argsort(-gains, kind="stable")[:num_rows]
    expected = decoding.sequences + np.concatenate([[0.0], np.cumsum(gains[order])])
    rows = load.tokens + np.arange(len(order) + 1, dtype=np.float64)
    context = load.context + np.concatenate([[0.0], np.cumsum(np.asarray(pasts, np.float64)[owners[order]])])
    ms = times.predict_ms(rows, context)
    ms[1:] += times.extra_ms
    ms += times.changing_ms(rows) - times.beside_ms(load, decoding)
    speeds = expected / ms
    speeds[ms - ms[0] > times.most_delay_ms(load, decoding)] = 0.0
    best = int(np.argmax(speeds))
    if speeds[best] < margin(decoding) * speeds[0]:
        best = 0
    counts = np.bincount(owners[order[:best]], minlength=len(rates))
    return Allotment(counts.tolist(), float(speeds[best]))
