"""Load on the scheduler, played through on a clock of its own: no engine, no threads, no waiting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qtool.runtime.blocks import BlockManager
from qtool.runtime.failures import OverloadedError
from qtool.runtime.request import SamplingParams, SequenceState
from qtool.runtime.scheduler import Scheduler, SchedulerConfig
from qtool.runtime.slo import Pacer
from qtool.runtime.steptime import StepLoad, StepTimeModel

StepTime = Callable[[StepLoad, float], float]
"""Milliseconds of a step that begins at a time in seconds."""


@dataclass(frozen=True)
class Asked:
    """A request: when, how long its prompt is, how long its answer gets and how long it might."""

    at: float
    num_prompt: int
    num_answer: int
    max_tokens: int


@dataclass
class Outcome:
    """What became of the load."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    num_refused: int = 0
    seconds: float = 0.0
    num_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def poisson(rate: float, start: float, seconds: float, seed: int) -> list[Asked]:
    """Requests of about 200 tokens in and 60 out, at random times, `rate` a second on average."""
    generator = np.random.default_rng(seed)
    times = start + np.cumsum(generator.exponential(1 / rate, int(2 * rate * seconds) + 10))
    return [
        Asked(at, int(generator.integers(20, 400)), int(generator.integers(20, 100)), 128)
        for at in times.tolist()
        if at < start + seconds
    ]


def simulate(
    config: SchedulerConfig, load: Sequence[Asked], step_ms: StepTime, num_blocks: int = 4000
) -> Outcome:
    """Serve a load, to its end, with steps that take `step_ms`."""
    scheduler = Scheduler(config, BlockManager(num_blocks, 32), max_context=8192)
    if config.slo is not None:
        scheduler.pacer = Pacer(config.slo, StepTimeModel(sweep(step_ms)))
    outcome, now = Outcome(), load[0].at
    left, answers = list(load), {}
    unfinished: set[int] = set()
    while left or unfinished:
        while left and left[0].at <= now:
            asked = left.pop(0)
            number = len(load) - len(left)
            try:
                scheduler.refuse_overload(len(unfinished), [asked.num_prompt], 1)
            except OverloadedError:
                outcome.num_refused += 1
                continue
            prompt = [number] * asked.num_prompt
            state = SequenceState(
                number, prompt, SamplingParams(max_tokens=asked.max_tokens), arrived=asked.at
            )
            scheduler.add(state)
            unfinished.add(number)
            answers[number] = asked.num_answer
        for state, _ in scheduler.late(now):
            scheduler.remove(state)
            unfinished.discard(state.id)
            outcome.num_refused += 1
        plan = scheduler.schedule(now)
        if not plan.chunks:
            if unfinished:
                raise AssertionError("nothing is scheduled while sequences wait")
            if left:
                now = left[0].at
            continue
        planned = plan.load()
        took = step_ms(planned, now)
        now += took / 1000
        ends = [chunk.sequence for chunk in plan.chunks if chunk.reaches_end]
        scheduler.commit(plan.chunks)
        if scheduler.pacer is not None:
            scheduler.pacer.model.update(planned, took)
        for state in ends:
            state.tokens.append(0)
            outcome.num_tokens += 1
            if state.first_token is None:
                state.first_token = now
                outcome.ttft_ms.append((now - state.arrived) * 1000)
            if state.num_generated == answers[state.id]:
                outcome.tpot_ms.append((now - state.first_token) * 1000 / (state.num_generated - 1))
                scheduler.remove(state)
                unfinished.discard(state.id)
    outcome.seconds = now - load[0].at
    return outcome


def sweep(step_ms: StepTime) -> list[tuple[StepLoad, float]]:
    """What a sweep at the start would measure."""
    shapes = [
        (1, 0, 1),
        (1, 1000, 1),
        (1, 0, 16),
        (1, 500, 16),
        (1, 0, 64),
        (64, 0, 1),
        (256, 0, 1),
        (256, 1000, 1),
    ]
    loads = []
    for new, past, count in shapes:
        load = StepLoad()
        for _ in range(count):
            load = load.plus(past, new)
        loads.append((load, step_ms(load, 0.0)))
    return loads
