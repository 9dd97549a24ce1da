"""How many drafts are verified: the best number by what they bring and cost, none where they don't pay."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.request import SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.decide import Acceptance, StepTimes, allot
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.steptime import StepLoad
from tests.runtime.drafters import ScriptedDrafter, Steady, knowing
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.test_speculation_loop import run


def curve(*points: tuple[int, float]) -> StepTimes:
    return StepTimes([(StepLoad(rows, 0, 1), ms) for rows, ms in points])


def batch(count: int) -> StepLoad:
    return StepLoad(count, 0, count)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.floats(0.0, 3.0), min_size=8, max_size=8),
    rates=st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
    num_rows=st.integers(0, 8),
)
def test_no_other_allotment_promises_more_tokens_a_second(
    steps: list[float], rates: list[list[float]], num_rows: int
) -> None:
    times = curve(*((rows + 1, 5.0 + sum(steps[: rows + 1])) for rows in range(8)))
    rates = [sorted(own, reverse=True) for own in rates]
    found = allot(times, batch(len(rates)), rates, [0] * len(rates), num_rows)

    def speed(counts: Sequence[int]) -> float:
        gained = sum(sum(own[:count]) for own, count in zip(rates, counts, strict=True))
        rows, none = np.array(float(len(rates) + sum(counts))), np.zeros(())
        return (len(rates) + gained) / float(times.predict_ms(rows, none))

    possible = itertools.product(*(range(len(own) + 1) for own in rates))
    best = max(speed(counts) for counts in possible if sum(counts) <= num_rows)
    assert speed(found.counts) == pytest.approx(found.tokens_per_ms)
    if sum(found.counts):
        assert found.tokens_per_ms == pytest.approx(best)
    else:  # less than this is not worth the risk
        assert best <= 1.031 * speed([0] * len(rates))


def test_speculation_is_off_where_the_batch_is_large_and_comes_back() -> None:
    """Up to eight rows cost next to nothing, as on a machine that waits for memory."""
    times = curve((1, 10.0), (8, 11.0), (64, 160.0))
    rates = [0.7, 0.5, 0.35]
    chosen = [
        sum(allot(times, batch(count), [rates] * count, [100] * count, 99).counts)
        for count in (1, 2, 7, 16, 1)
    ]
    assert chosen[0] == chosen[-1] == 3
    assert chosen[1] == 6
    assert chosen[2] <= 1
    assert chosen[3] == 0


def test_acceptance_is_learnt_by_place_and_recent_drafts_count_more() -> None:
    found = Acceptance(20)
    assert found.rates(3) == [0.25, 0.0625, 0.015625]  # nothing is known
    for _ in range(200):
        found.update(3, [0, 1])
    first, second, third = found.rates(3)
    assert first > 0.93
    assert second > 0.9
    assert third < 0.12
    assert found.rates(5)[4] <= third
    for _ in range(60):
        found.update(3, [])
    assert max(found.rates(3)) < 0.15
    own = Acceptance(20)
    assert own.rates(2, [0.8, 0.6]) == pytest.approx([0.8, 0.6])  # a new request is like the others


def test_step_times_follow_the_machine_where_it_is_seen() -> None:
    times = curve((1, 10.0), (4, 20.0), (8, 30.0))
    rows = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    assert times.predict_ms(rows, np.zeros(5)).tolist() == pytest.approx([10, 10 + 10 / 3, 20, 30, 50])
    assert [times.step_ms(count, 0) for count in rows] == pytest.approx([10, 10 + 10 / 3, 20, 30, 50])
    for _ in range(200):
        times.update(StepLoad(1, 0, 1), 20.0)
        times.update(StepLoad(4, 0, 1), 40.0)
    now = times.predict_ms(rows, np.zeros(5)).tolist()
    assert now[0] == pytest.approx(20, rel=0.05)
    assert now[2] == pytest.approx(40, rel=0.05)
    assert now[3] > 33  # what is not seen follows a little


def test_a_disturbed_measurement_does_not_make_all_larger_steps_look_dear() -> None:
    times = curve((1, 10.0), (2, 90.0), (4, 13.0), (8, 15.0))
    assert times.predict_ms(np.array([2.0, 4.0]), np.zeros(2)).tolist() == [13.0, 13.0]


def test_context_has_its_price() -> None:
    loads = [(StepLoad(8, 36, 1), 30.0), (StepLoad(8, 4132, 1), 34.0), (StepLoad(1, 1, 1), 10.0)]
    found = StepTimes(loads).predict_ms(np.array([8.0]), np.array([4096.0]))
    assert found.tolist() == pytest.approx([34.0])


class Clock:
    """Ten milliseconds go by whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.mark.parametrize(("ms", "right"), [(1.0, 0.9), (50.0, 0.9), (1.0, 0.0)])
def test_a_drafter_that_costs_is_asked_where_it_pays_and_else_rarely(ms: float, right: float) -> None:
    engine = FakeEngine(num_blocks=200, max_context=1000)
    drafter = ScriptedDrafter(knowing(lambda text, n: greedy(engine, list(text), n), 320, right), ms=ms)
    flat = Steady([(StepLoad(1, 0, 1), 10.0), (StepLoad(32, 0, 1), 10.5)])
    clock = Clock()
    using = Speculator([drafter], flat, 320, clock=clock)
    params = SamplingParams(max_tokens=450, temperature=0)
    found, steps = run(engine, [([5, 6, 7], params)], using, SchedulerConfig(4, 64))
    assert [output.token for output in found[0]] == greedy(engine, [5, 6, 7], 450)
    drafted = [bool(step.speculation and step.speculation.drafted) for step in steps]
    if ms == 1.0 and right == 0.9:
        assert 0.9 * len(steps) < sum(drafted) < len(steps) - 1  # one more is plain, to be timed
        assert len(steps) < 180
    else:
        assert 0 < sum(drafted) * ms < 0.01 * 1000 * clock.now
