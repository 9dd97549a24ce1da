"""How many drafts are verified: the best number by what they bring and cost, none where they don't pay."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.engines.contract import Floats, Step, StepResult
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import RequestOptions, SamplingParams, SequenceState
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.contract import EMPTY, Draft, DraftRequest, Seen
from qtool.runtime.speculation.decide import CAUTIOUS, HOPEFUL, Acceptance, StepTimes, allot, margin
from qtool.runtime.speculation.records import Records
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.speculation.worth import Worth
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
    found = allot(times, batch(len(rates)), batch(len(rates)), rates, [0] * len(rates), num_rows)

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
        assert best <= 1.001 * margin(batch(len(rates))) * speed([0] * len(rates))


def test_speculation_is_off_where_the_batch_is_large_and_comes_back() -> None:
    """Up to eight rows cost next to nothing, as on a machine that waits for memory."""
    times = curve((1, 10.0), (8, 11.0), (64, 160.0))
    rates = [0.7, 0.5, 0.35]
    chosen = [
        sum(allot(times, batch(count), batch(count), [rates] * count, [100] * count, 99).counts)
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


@pytest.mark.parametrize(("guess", "expected"), [(CAUTIOUS, 0.75), (HOPEFUL, 0.625)])
def test_a_few_lucky_drafts_say_less_of_a_text_where_drafts_have_to_be_made_to_be_judged(
    guess: float, expected: float
) -> None:
    records, key = Records(), ("some", 0)
    before, text = (SequenceState(n, [5, 6], SamplingParams(), RequestOptions()) for n in range(2))
    records.rates(key, guess, before, 1)
    for n in range(400):
        records.judge(before, key, Draft([7]), [0] if n % 2 else [])
    for _ in range(2):
        records.judge(text, key, Draft([7]), [0])
    assert records.rates(key, guess, text, 1) == pytest.approx([expected], abs=0.02)


def test_drafts_are_not_cheap_for_the_prompt_beside_them() -> None:
    """A row takes 1 ms of the 11 of a step that decodes, of which a token is 5 % of the time at most."""
    times = curve((1, 11.0), (200, 210.0))
    decoding, beside = StepLoad(1, 0, 1), StepLoad(101, 0, 2)
    assert allot(times, beside, decoding, [[0.05]], [0], 3).counts == [0]
    found = allot(times, beside, decoding, [[0.5]], [0], 3)
    assert found.counts == [1]
    assert found.tokens_per_ms == pytest.approx(1.5 / 12)


def test_a_prompt_hardly_waits_for_drafts() -> None:
    """Of a step of 111 ms eight tokens would take 8; three take 2.7 %."""
    times, rates = curve((1, 11.0), (200, 210.0)), [[0.9] * 8]
    decoding = StepLoad(1, 0, 1)
    assert allot(times, decoding, decoding, rates, [0], 8).counts == [8]
    assert allot(times, StepLoad(101, 0, 2), decoding, rates, [0], 8).counts == [3]


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


def test_a_number_of_rows_is_kept_where_a_change_costs_more_than_it_brings() -> None:
    times = StepTimes([(StepLoad(rows, 0, 1), 10.0 + rows / 10) for rows in range(1, 5)], change_ms=8.0)
    step, rates = StepLoad(1, 0, 1), [[0.9, 0.05, 0.04]]
    assert allot(times, step, step, rates, [0], 3).counts == [3]  # no step was before
    assert not times.note_rows(3, drafted=True)
    assert allot(times, step, step, rates, [0], 3).counts == [2]
    assert times.note_rows(1, drafted=False)
    assert allot(times, step, step, [[0.3]], [0], 3).counts == [0]
    assert allot(times, step, step, [[0.8, 0.6, 0.5]], [0], 3).counts == [3]


def test_a_change_of_rows_is_charged_in_full_where_steps_with_drafts_keep_changing() -> None:
    def charged(rows: Sequence[int], drafted: bool) -> float:
        for count in rows:
            times.note_rows(count, drafted)
        return float(times.changing_ms(np.array(99.0)))

    times = StepTimes([(StepLoad(1, 0, 1), 10.0)], change_ms=8.0)
    assert charged([16], drafted=False) == pytest.approx(4.0)
    assert charged([17, 20] * 50, drafted=True) > 7.5
    for _ in range(100):
        times.note_rows(17, drafted=True)
        times.note_rows(16, drafted=False)
    assert float(times.changing_ms(np.array(99.0))) > 14  # one there and one back
    assert charged([16] * 2000, drafted=False) == pytest.approx(4.0, abs=0.1)
    assert charged([4] * 100, drafted=True) < 0.5


def test_a_disturbed_measurement_does_not_make_all_larger_steps_look_dear() -> None:
    times = curve((1, 10.0), (2, 90.0), (4, 13.0), (8, 15.0))
    assert times.predict_ms(np.array([2.0, 4.0]), np.zeros(2)).tolist() == [13.0, 13.0]


def test_context_has_its_price() -> None:
    loads = [(StepLoad(8, 36, 1), 30.0), (StepLoad(8, 4132, 1), 34.0), (StepLoad(1, 1, 1), 10.0)]
    found = StepTimes(loads).predict_ms(np.array([8.0]), np.array([4096.0]))
    assert found.tolist() == pytest.approx([34.0])


class TickingEngine(FakeEngine):
    """A step takes 20 milliseconds of its own clock, and nothing else takes any."""

    now = 0.0

    def run(self, step: Step) -> Floats:
        self.now += 0.02
        return super().run(step)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(("ms", "right"), [(1.0, 0.9), (50.0, 0.9), (1.0, 0.0)])
def test_a_drafter_that_costs_is_asked_where_it_pays_and_else_rarely(ms: float, right: float) -> None:
    engine = TickingEngine(num_blocks=400, max_context=1200)
    count = 450 if ms == 1.0 else 900  # a dear one has to wait for its turn
    drafter = ScriptedDrafter(knowing(lambda text, n: greedy(engine, list(text), n), 320, right), ms=ms)
    flat = Steady([(StepLoad(1, 0, 1), 10.0), (StepLoad(32, 0, 1), 10.5)])
    using = Speculator([drafter], flat, 320, clock=engine.clock)
    params = SamplingParams(max_tokens=count, temperature=0)
    found, steps = run(engine, [([5, 6, 7], params)], using, SchedulerConfig(4, 64))
    assert [output.token for output in found[0]] == greedy(engine, [5, 6, 7], count)
    drafted = [bool(step.speculation and step.speculation.drafted) for step in steps]
    if ms == 1.0 and right == 0.9:
        assert 0.9 * len(steps) < sum(drafted) < len(steps) - 1  # one more is plain, to be timed
        assert len(steps) < 180
    else:
        assert 0 < sum(drafted) * ms < 0.01 * 1000 * engine.now


def test_drafts_that_are_left_out_for_being_unlikely_are_counted_as_asked_for() -> None:
    engine = TickingEngine(num_blocks=200, max_context=1000)
    asked = 0

    def guess(generator: np.random.Generator, request: DraftRequest) -> Draft:
        nonlocal asked
        asked += 1
        if generator.random() > 0.25:
            return Draft((), num_considered=request.num_tokens)
        return Draft(greedy(engine, list(request.sequence.tokens), request.num_tokens))

    # a quarter of the drafts is six tokens, all right: 2.5 tokens in 30.5 ms, and without one in 10
    flat = Steady([(StepLoad(1, 0, 1), 10.0), (StepLoad(32, 0, 1), 10.5)])
    using = Speculator([ScriptedDrafter(guess, ms=20.0)], flat, 320, clock=engine.clock)
    params = SamplingParams(max_tokens=450, temperature=0)
    found, _ = run(engine, [([5, 6, 7], params)], using, SchedulerConfig(4, 64))
    assert [output.token for output in found[0]] == greedy(engine, [5, 6, 7], 450)
    assert asked < 40


def test_rows_are_expected_for_the_drafts_that_are_made() -> None:
    found = Acceptance(50)
    assert found.num_made(3) == 3
    for _ in range(100):
        found.update(1, [0], 3)
        found.update(0, [], 3)
    first, second, _ = found.rates(3)
    assert first == pytest.approx(0.5, abs=0.02)
    assert second < 0.02
    assert found.num_made(3) == pytest.approx(0.5, abs=0.1)


class Dear(ScriptedDrafter):
    """Drafts that are always wrong, are said to be free, and take as long to find as the step itself."""

    def __init__(self, engine: TickingEngine) -> None:
        super().__init__(knowing(lambda text, n: greedy(engine, list(text), n), 320, 0.0))
        self._engine, self.num_looks = engine, 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self._engine.now += 0.001
        self.num_looks += 1
        return super().propose(requests)


def test_looking_in_vain_beside_fast_steps_stops() -> None:
    engine = TickingEngine(num_blocks=200, max_context=1000)
    drafter = Dear(engine)
    using = Speculator([drafter], curve((1, 1.0), (32, 2.0)), 320, clock=engine.clock)
    params = SamplingParams(max_tokens=450, temperature=0)
    found, steps = run(engine, [([5, 6, 7], params)], using, SchedulerConfig(4, 64))
    assert [output.token for output in found[0]] == greedy(engine, [5, 6, 7], 450)
    assert 20 < drafter.num_looks < 100
    assert sum(len(step.speculation.lengths) for step in steps if step.speculation is not None) == 449


class Seeing(TickingEngine):
    """Gives hidden states too."""

    def run_with_hidden(self, step: Step) -> StepResult:
        return StepResult(self.run(step), np.zeros((len(step.token_ids), 1), np.float32))


class Blind(ScriptedDrafter):
    """Drafts from the hidden states of the step before alone, and is right from the 200th token on."""

    wants_hidden = True

    def __init__(self, engine: TickingEngine) -> None:
        def guess(generator: np.random.Generator, request: DraftRequest) -> Draft:
            tokens = list(request.sequence.tokens)
            if self._seen != len(tokens):
                return EMPTY
            answer = greedy(engine, tokens, request.num_tokens)
            return Draft(answer if len(tokens) > 200 else [(token + 1) % 320 for token in answer])

        super().__init__(guess, ms=1.0)
        self._engine, self._seen = engine, 0

    def observe(self, seen: Sequence[Seen]) -> None:
        self._engine.now += 0.0002
        for one in seen:
            self._seen = 0 if one.hidden is None else one.sequence.num_computed + 1
        super().observe(seen)


def test_heads_are_tried_again_where_most_steps_go_without_a_look() -> None:
    engine = Seeing(num_blocks=200, max_context=1000)
    flat = Steady([(StepLoad(1, 0, 1), 20.0), (StepLoad(32, 0, 1), 20.5)])
    using = Speculator([Blind(engine)], flat, 320, clock=engine.clock)
    loop = EngineLoop(engine, SchedulerConfig(4, 64), lambda _: None, speculator=using, clock=engine.clock)
    loop.submit([[5, 6, 7]], SamplingParams(max_tokens=700, temperature=0))
    while loop.receive(wait=False):
        loop.step()
    assert engine.num_steps < 500


def test_a_draft_accepted_beside_a_prompt_saves_no_part_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[float] = []
    monkeypatch.setattr(Worth, "looked", lambda _, __, saved_ms: saved.append(saved_ms or 0.0))
    engine = TickingEngine(num_blocks=200, max_context=1000)
    guess = knowing(lambda text, n: greedy(engine, list(text), n), 320, 1.0)
    times = Steady([(StepLoad(1, 0, 1), 10.0), (StepLoad(512, 0, 1), 400.0)])
    loop = EngineLoop(
        engine,
        SchedulerConfig(4, 400),
        lambda _: None,
        speculator=Speculator([ScriptedDrafter(guess)], times, 320, clock=engine.clock),
        clock=engine.clock,
    )
    loop.submit([[5, 6, 7]], SamplingParams(max_tokens=60, temperature=0))
    for _ in range(4):
        assert loop.receive(wait=False)
        loop.step()
    loop.submit([list(range(3, 303))], SamplingParams(max_tokens=1, temperature=0))
    while loop.receive(wait=False):
        loop.step()
    assert max(saved) > 10
    assert max(saved) < 70  # six tokens of a step of ten milliseconds, at most


def test_looks_are_paid_from_what_drafts_save_and_a_small_share_of_the_time() -> None:
    vain, useful, slow = Worth(), Worth(), Worth()
    looks = {vain: 0, useful: 0, slow: 0}
    for worth, step_ms, saved_ms in ((vain, 1.0, None), (useful, 1.0, 0.2), (slow, 50.0, None)):
        for _ in range(2000):
            worth.pass_time(step_ms, 1)
            if worth.allows_look:
                looks[worth] += 1
                worth.looked(0.1, saved_ms)
    assert looks[vain] < 150  # of 2000 steps of 1 ms half a percent pays for 100 looks of 0.1 ms
    assert looks[useful] == looks[slow] == 2000


@pytest.mark.parametrize(("accepted", "least", "most"), [(1.2, 900, 1000), (0.5, 0, 100)])
def test_drafts_that_fail_now_and_then_are_no_reason_to_rest(accepted: float, least: int, most: int) -> None:
    """A step takes 35 ms and a draft 27; all of its two tokens are accepted, or none."""
    worth, generator, looks = Worth(), np.random.default_rng(0), 0
    for _ in range(1000):
        worth.pass_time(35.0, 1)
        if worth.allows_look:
            looks += 1
            worth.looked(0.15, 2 * 35.0 * (generator.random() < accepted / 2) - 27.0)
    assert least < looks < most


def test_what_drafts_add_around_the_engine_counts_and_is_forgotten() -> None:
    times = curve((1, 0.2), (8, 0.21))
    assert sum(allot(times, batch(1), batch(1), [[0.5]], [0], 8).counts) == 1
    for _ in range(60):
        times.note_outside(0.05)
        times.note_extra(StepLoad(1, 0, 1), 0.45)
    assert times.step_ms(1, 0) == pytest.approx(0.25, rel=0.05)
    assert times.extra_ms > 0.15
    assert sum(allot(times, batch(1), batch(1), [[0.5]], [0], 8).counts) == 0
    for _ in range(1000):
        times.note_outside(0.05)
    assert sum(allot(times, batch(1), batch(1), [[0.5]], [0], 8).counts) == 1
