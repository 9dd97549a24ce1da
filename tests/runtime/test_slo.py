"""Objectives hold where load goes past capacity, by simulation with the scheduler's own code."""

from dataclasses import replace

import numpy as np
import pytest

from qtool.errors import UsageError
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.slo import Slo, parse_slo
from qtool.runtime.steptime import StepLoad, StepTimeModel
from tests.runtime.simulation import Asked, Outcome, StepTime, poisson, simulate

TPOT_MS, TTFT_MS = 50.0, 1500.0


def machine(noise: float = 0.1, drift: float = 1.2, seed: int = 0) -> StepTime:
    """Step times as of a small CPU: 14 ms, 0.35 a token and more with context; slower after 20 s, uneven."""
    generator = np.random.default_rng(seed)

    def step_ms(load: StepLoad, now: float) -> float:
        exact = 14 + 0.35 * load.tokens + 0.1 * load.sequences + 0.4 * load.context / 1000
        return exact * (drift if now > 20 else 1.0) * generator.lognormal(0, noise)

    return step_ms


def stepped_load() -> list[Asked]:
    """Half of what the machine can serve, then all of it, then three times as much."""
    return [
        *poisson(2, 0, 10, seed=1),
        *poisson(5, 10, 10, seed=2),
        *poisson(15, 20, 20, seed=3),
    ]


def served(config: SchedulerConfig) -> Outcome:
    return simulate(config, stepped_load(), machine())


def p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


LIMITS = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_queue=100_000)


def test_tpot_holds_where_load_steps_past_capacity_and_would_not_without_an_objective() -> None:
    assert p95(served(LIMITS).tpot_ms) > 2 * TPOT_MS
    held = served(replace(LIMITS, slo=Slo(tpot_ms=TPOT_MS)))
    assert len(held.tpot_ms) == len(stepped_load())
    assert p95(held.tpot_ms) <= TPOT_MS


def test_the_objective_costs_no_more_throughput_than_the_best_fixed_limits_that_hold_it() -> None:
    fixed = [
        served(replace(LIMITS, max_num_seqs=seqs, max_num_batched_tokens=max(tokens, seqs)))
        for seqs in (2, 4, 8, 16, 24, 32)
        for tokens in (16, 32, 64, 128)
    ]
    best = max(outcome.tokens_per_second for outcome in fixed if p95(outcome.tpot_ms) <= TPOT_MS)
    assert served(replace(LIMITS, slo=Slo(tpot_ms=TPOT_MS))).tokens_per_second >= 0.9 * best


def test_requests_that_cannot_have_their_first_token_in_time_are_refused_and_the_others_have_it() -> None:
    held = served(replace(LIMITS, slo=Slo(TTFT_MS, TPOT_MS, "reject")))
    assert held.num_refused > len(stepped_load()) // 4
    assert len(held.ttft_ms) + held.num_refused == len(stepped_load())
    assert p95(held.ttft_ms) <= TTFT_MS * 1.2
    assert p95(held.tpot_ms) <= TPOT_MS
    easy = simulate(
        replace(LIMITS, slo=Slo(TTFT_MS, TPOT_MS, "reject")), poisson(1, 0, 20, seed=5), machine()
    )
    assert easy.num_refused == 0


@pytest.mark.parametrize("tpot_ms", [0.001, 15.0])
def test_an_objective_that_cannot_be_met_does_not_serve_one_after_the_other(tpot_ms: float) -> None:
    load = poisson(3, 0, 10, seed=4)
    alone = simulate(replace(LIMITS, max_num_seqs=1), load, machine())
    missed = simulate(replace(LIMITS, slo=Slo(tpot_ms=tpot_ms)), load, machine())
    assert len(missed.tpot_ms) == len(load)
    assert missed.seconds < 0.75 * alone.seconds


def test_the_model_finds_the_coefficients_and_follows_a_machine_that_slows_down() -> None:
    steady, slow = machine(noise=0, drift=1), machine(noise=0, drift=2)
    loads = [StepLoad(tokens, 100 * tokens, sequences) for tokens in (1, 16, 200) for sequences in (1, 9)]
    loads += [StepLoad(16, 9000, 16), StepLoad(64, 64, 1)]
    model = StepTimeModel([(load, steady(load, 0)) for load in loads])
    unseen = StepLoad(100, 20_000, 5)
    assert model.predict_ms(unseen) == pytest.approx(steady(unseen, 0), rel=1e-3)
    for _ in range(300):
        for load in loads[:4]:
            model.update(load, slow(load, 30))
    assert model.predict_ms(unseen) == pytest.approx(slow(unseen, 30), rel=0.15)


def test_steps_that_are_held_up_count_as_much_as_the_others() -> None:
    generator = np.random.default_rng(1)
    loads = [StepLoad(n, 50 * n, n) for n in (1, 2, 4, 8)]
    model = StepTimeModel([(load, 10.0 + load.tokens) for load in loads])
    for step in range(2000):
        held_up = 4.0 if generator.random() < 0.25 else 1.0
        load = loads[step % 4]
        model.update(load, (10.0 + load.tokens) * held_up)
    foretold = []
    for step in range(400):  # what is foretold moves with the last fifty steps: its mean is judged
        load = loads[step % 4]
        foretold.append(model.predict_ms(load) / (10.0 + load.tokens))
        model.update(load, (10.0 + load.tokens) * (4.0 if generator.random() < 0.25 else 1.0))
    assert np.mean(foretold) == pytest.approx(0.75 * 1 + 0.25 * 4, rel=0.1)


def test_no_load_is_ever_predicted_to_save_time() -> None:
    generator = np.random.default_rng(0)
    sweep = [(StepLoad(n, n, 1 + n % 3), float(generator.uniform(5, 6))) for n in range(1, 20)]
    model = StepTimeModel(sweep)
    for load in (StepLoad(1000, 0, 0), StepLoad(0, 10**6, 0), StepLoad(0, 0, 1000)):
        assert model.predict_ms(load) >= model.predict_ms(StepLoad()) >= 0


def test_objectives_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms,tpot=0.05s", "reject") == Slo(500.0, 50.0, "reject")
    assert parse_slo(" tpot = 20 ms ") == Slo(tpot_ms=20.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no objective"),
        ("tpot", "is no objective"),
        ("tpot=50", "is no objective"),
        ("latency=5ms", "is no objective"),
        ("tpot=0ms", "must be above 0"),
        ("tpot=5ms,tpot=6ms", "given twice"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_slo(text)


def test_refusing_needs_a_ttft_to_refuse_by() -> None:
    with pytest.raises(UsageError, match="goes by ttft"):
        Slo(tpot_ms=5, policy="reject")
