"""The engine loop in tests: in a thread of its own, with what collects its outputs."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from qtool.runtime.engines.contract import Engine
from qtool.runtime.loop import EngineLoop, Output
from qtool.runtime.request import SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from tests.runtime.fake import FakeEngine

GREEDY = SamplingParams(max_tokens=12, temperature=0)


class Sink:
    """Collects outputs; `until` waits for a condition on them."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[Output]] = defaultdict(list)
        self._changed = threading.Condition()

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.outputs[output.request_id].append(output)
            self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=30)

    def result(self, request_id: int) -> list[int | None]:
        """The tokens of a request once it has ended."""
        self.until(lambda: self.ended(request_id))
        return [output.token for output in self.outputs[request_id]]

    def ended(self, request_id: int) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and (outputs[-1].finish_reason or outputs[-1].error) is not None


@contextmanager
def running(engine: Engine, seqs: int = 8, budget: int = 64) -> Iterator[tuple[EngineLoop, Sink]]:
    sink = Sink()
    loop = EngineLoop(engine, SchedulerConfig(seqs, budget), sink.deliver)
    loop.start()
    try:
        yield loop, sink
    finally:
        loop.stop()
        assert loop.join(10)


def answers(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], config: SchedulerConfig
) -> tuple[list[list[int]], int]:
    """Tokens of requests that all arrive at once, without threads; and how often one was preempted."""
    found: dict[int, list[int]] = defaultdict(list)
    loop = EngineLoop(engine, config, lambda _: None)
    ids = [loop.submit([prompt], params)[0] for prompt, params in requests]
    loop.drain()
    while step(loop, found, wait=True):
        pass
    assert loop.stats().num_free_blocks == engine.num_blocks
    return [found[request_id] for request_id in ids], loop.stats().num_preemptions


def generate(
    engine: FakeEngine,
    requests: Sequence[tuple[list[int], SamplingParams]],
    seqs: int = 8,
    budget: int = 64,
    prefix_caching: bool = True,
) -> tuple[list[list[int]], int]:
    """As `answers`."""
    return answers(engine, requests, SchedulerConfig(seqs, budget, prefix_caching))


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 320, generator.integers(1, longest)).tolist() for _ in range(count)]


def step(loop: EngineLoop, answers: dict[int, list[int]], *, wait: bool = False) -> bool:
    """Run a step by hand if there is anything to run, and collect its tokens."""
    if not loop.receive(wait=wait):
        return False
    for output in loop.step():
        assert output.token is not None
        answers[output.request_id].append(output.token)
    return True
