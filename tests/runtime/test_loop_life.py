"""The life of requests in the engine loop: many at once, cancelled, refused, failed, drained, late."""

import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool.runtime.engines.contract import Step
from qtool.runtime.events import Event, SequenceDone, StepDone
from qtool.runtime.failures import DeadlineExceededError, NotAdmittingError, OverloadedError
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import ParameterError, RequestOptions, SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.slo import Slo
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.loops import GREEDY, Sink, prompts, running, step


def test_requests_from_many_threads_are_all_answered() -> None:
    asked = prompts(24, seed=3)
    found: dict[int, list[int | None]] = {}
    with running(FakeEngine(num_blocks=20)) as (loop, sink):

        def ask(number: int) -> None:
            found[number] = sink.result(loop.submit([asked[number]], GREEDY)[0])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert found == {number: greedy(FakeEngine(), prompt, 12) for number, prompt in enumerate(asked)}


def test_a_cancelled_request_is_gone_before_the_next_step_and_its_blocks_are_free() -> None:
    engine = FakeEngine()
    loop = EngineLoop(engine, SchedulerConfig(), lambda _: None)
    first, second = loop.submit([[1, 2, 3]], GREEDY)[0], loop.submit([[4]], GREEDY)[0]
    assert loop.receive()
    assert {output.request_id for output in loop.step()} == {first, second}
    loop.cancel(first)
    assert loop.receive()
    assert {output.request_id for output in loop.step()} == {second}
    assert loop.stats().num_free_blocks == engine.num_blocks - 1
    for ended_or_unknown in (first, second, second, 12345):
        loop.cancel(ended_or_unknown)
    loop.drain()
    assert not loop.receive()
    assert loop.stats().num_free_blocks == engine.num_blocks


def test_the_loop_goes_on_after_a_cancellation() -> None:
    with running(FakeEngine()) as (loop, sink):
        loop.cancel(loop.submit([[1, 2, 3]], GREEDY)[0])
        assert sink.result(loop.submit([[4]], GREEDY)[0]) == greedy(FakeEngine(), [4], 12)


def test_an_engine_failure_fails_every_request_and_refuses_new_ones() -> None:
    engine = FakeEngine()
    engine.fail_at = 2
    with running(engine, seqs=2) as (loop, sink):
        engine.gate.clear()
        requests = [loop.submit([prompt], GREEDY)[0] for prompt in prompts(5)]
        engine.gate.set()
        for request in requests:
            sink.result(request)
            assert str(sink.outputs[request][-1].error) == (
                "the engine failed: RuntimeError: the fake engine was told to fail"
            )
        assert isinstance(loop.failure, RuntimeError)
        with pytest.raises(NotAdmittingError, match="the engine failed"):
            loop.submit([[1]], GREEDY)[0]
        assert loop.stats().num_free_blocks == engine.num_blocks


def test_logits_that_are_not_finite_fail_one_request_and_no_other() -> None:
    class Broken(FakeEngine):
        def logits(self, prefix: np.ndarray) -> np.ndarray:
            row = super().logits(prefix)
            if prefix[0] == 9:
                row[3] = np.nan
            return row

    with running(Broken()) as (loop, sink):
        bad, good = loop.submit([[9, 9]], GREEDY)[0], loop.submit([[8, 8]], GREEDY)[0]
        assert sink.result(good) == greedy(FakeEngine(), [8, 8], 12)
        assert sink.result(bad) == [None]
        assert str(sink.outputs[bad][-1].error) == "the model gave logits that are not finite"
        assert sink.result(loop.submit([[8]], GREEDY)[0]) == greedy(FakeEngine(), [8], 12)


def test_draining_finishes_what_was_admitted_and_nothing_else() -> None:
    engine = FakeEngine()
    with running(engine, seqs=2) as (loop, sink):
        engine.gate.clear()
        requests = [loop.submit([prompt], GREEDY)[0] for prompt in prompts(5)]
        loop.drain()
        with pytest.raises(NotAdmittingError, match="shutting down"):
            loop.submit([[1]], GREEDY)[0]
        engine.gate.set()
        assert loop.join(20)
        answers = [sink.result(request) for request in requests]
    assert answers == [greedy(FakeEngine(), prompt, 12) for prompt in prompts(5)]


def test_stopping_fails_what_has_not_finished() -> None:
    engine = FakeEngine()
    with running(engine) as (loop, sink):
        engine.gate.clear()
        request = loop.submit([[1]], GREEDY)[0]
        loop.stop()
        engine.gate.set()
        assert loop.join(20)
        sink.result(request)
        assert "stopped before" in str(sink.outputs[request][-1].error)


def test_a_request_that_can_never_fit_is_refused_where_it_is_submitted() -> None:
    with running(FakeEngine(num_blocks=4, block_size=4)) as (loop, _):
        with pytest.raises(ParameterError, match="the KV cache holds 16 tokens"):
            loop.submit([[1] * 5], GREEDY)[0]
        with pytest.raises(ParameterError, match="prompt: is empty"):
            loop.submit([[]], GREEDY)[0]


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_full_queue_refuses_a_whole_request_at_once_and_takes_it_when_one_has_ended() -> None:
    loop = EngineLoop(FakeEngine(), SchedulerConfig(2, 64, max_queue=2), lambda _: None)
    first = loop.submit([[5], [6], [7]], GREEDY)
    with pytest.raises(OverloadedError, match="3 answers are under way, and the server takes 4") as caught:
        loop.submit([[8], [9]], GREEDY)
    assert caught.value.retry_after_s > 0
    loop.submit([[8]], GREEDY)
    loop.cancel(first[0])
    loop.receive(wait=False)
    loop.submit([[9]], GREEDY)
    assert loop.stats().num_refused == 1
    with pytest.raises(ParameterError, match="n: asks for 5 answers at once, and the server takes 4"):
        loop.submit([[5]], replace(GREEDY, n=5))


def test_a_request_is_given_up_when_its_own_limit_has_passed_running_or_waiting() -> None:
    clock, engine = Clock(), FakeEngine()
    loop = EngineLoop(engine, SchedulerConfig(1, 64), lambda _: None, clock)
    hasty = RequestOptions(timeout_s=2.0)
    late = [loop.submit([[5]], GREEDY, hasty)[0], loop.submit([[6]], GREEDY, hasty)[0]]
    patient = loop.submit([[7]], GREEDY)[0]
    loop.receive()
    assert [output.request_id for output in loop.step()] == late[:1]
    clock.now += 2.0
    outputs = loop.step()
    assert [output.request_id for output in outputs] == [*late, patient]
    assert all(isinstance(output.error, DeadlineExceededError) for output in outputs[:2])
    assert outputs[2].error is None
    assert loop.stats().num_free_blocks == engine.num_blocks - 1


def test_sequences_gather_for_the_batching_window_or_until_the_places_are_taken() -> None:
    clock, engine = Clock(), FakeEngine()
    loop = EngineLoop(engine, SchedulerConfig(3, 64, batch_wait_ms=50), lambda _: None, clock)
    loop.submit([[5]], GREEDY)
    clock.now += 0.04
    loop.submit([[6]], GREEDY)
    assert loop.receive(wait=False)
    assert loop.step() == []
    clock.now += 0.02
    assert len(loop.step()) == 2
    loop.submit([[7]], GREEDY)
    loop.receive()
    assert len(loop.step()) == 3  # the last place is taken: nothing to wait for


def test_a_running_loop_starts_what_gathered_when_the_window_ends_or_it_drains() -> None:
    sink = Sink()
    for drained in (False, True):
        config = SchedulerConfig(3, 64, batch_wait_ms=60_000 if drained else 50)
        loop = EngineLoop(FakeEngine(), config, sink.deliver)
        loop.start()
        request = loop.submit([[7]], GREEDY)[0]
        if drained:
            loop.drain()
        assert sink.result(request) == greedy(FakeEngine(), [7], 12)
        sink.outputs.clear()
        loop.stop()
        assert loop.join(10)


def test_events_tell_how_long_a_sequence_waited_and_took() -> None:
    clock = Clock()

    class Slow(FakeEngine):
        def run(self, step: Step) -> np.ndarray:
            clock.now += 0.5
            return super().run(step)

    loop = EngineLoop(Slow(), SchedulerConfig(1, 64), lambda _: None, clock)
    events: list[Event] = []
    loop.observers.append(events.append)
    short = replace(GREEDY, max_tokens=3)
    loop.submit([[5, 6]], short)
    loop.submit([[5, 6, 7]], short)
    while loop.receive(wait=False):
        loop.step()
    steps = [event for event in events if isinstance(event, StepDone)]
    ends = [event for event in events if isinstance(event, SequenceDone)]
    assert [(step.seconds, step.engine_seconds) for step in steps] == [(0.5, 0.5)] * 6
    assert [step.load.tokens for step in steps] == [2, 1, 1, 3, 1, 1]
    assert [end.queue_seconds for end in ends] == [0.0, 1.5]
    assert [end.ttft_seconds for end in ends] == [0.5, 2.0]
    assert [end.tpot_seconds for end in ends] == [0.5, 0.5]
    assert [end.total_seconds for end in ends] == [1.5, 3.0]
    assert (ends[0].num_prompt, ends[0].num_generated, ends[0].reason) == (2, 3, "length")
    stats = loop.stats()
    assert (stats.num_steps, stats.num_computed_tokens, stats.num_generated_tokens) == (6, 9, 6)


def test_two_hundred_clients_that_leave_at_random_leave_nothing_behind() -> None:
    engine = FakeEngine(num_blocks=24)
    sink, generator = Sink(), np.random.default_rng(7)
    loop = EngineLoop(engine, SchedulerConfig(8, 32), sink.deliver)
    loop.start()
    requests: list[list[int]] = []
    for number in range(200):
        prompt = [9] * int(generator.integers(0, 16)) + [number % 300]
        requests.append(loop.submit([prompt], replace(GREEDY, n=1 + number % 2)))
        leaving = requests[int(generator.integers(len(requests)))]
        for request in leaving:
            loop.cancel(request)
        time.sleep(float(generator.uniform(0, 0.002)))
    for request in (request for choices in requests[::2] for request in choices):
        loop.cancel(request)
    loop.drain()
    assert loop.join(60)
    stats = loop.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == engine.num_blocks
    assert not loop._sequences
    assert loop._num_unfinished == 0


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads memory as Linux tells it")
def test_five_thousand_requests_leave_memory_and_blocks_as_they_were() -> None:
    engine = FakeEngine(num_blocks=40, vocab_size=64)
    loop = EngineLoop(engine, SchedulerConfig(16, 64), lambda _: None)

    def serve(first: int, last: int) -> None:
        for number in range(first, last):
            prompt = [number % 60, number // 60 % 60, *[9] * (number % 9)]
            requests = loop.submit([prompt], SamplingParams(max_tokens=2, seed=number, n=1 + number % 2))
            if number % 7 == 0:
                loop.cancel(requests[0])
            step(loop, defaultdict(list))
        while step(loop, defaultdict(list)):
            pass

    serve(0, 1000)  # what is made once: the index of all blocks, pools of the allocator
    before = _resident_pages()
    serve(1000, 6000)
    assert _resident_pages() <= 1.05 * before
    assert loop.stats().num_free_blocks == engine.num_blocks
    assert not loop._sequences


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_an_objective_is_kept_with_step_times_measured_at_the_start() -> None:
    engine = FakeEngine(num_blocks=60)
    slo = SchedulerConfig(8, 32, slo=Slo(tpot_ms=1000))
    asked = prompts(6, seed=4)
    answers: dict[int, list[int]] = defaultdict(list)
    loop = EngineLoop(engine, slo, lambda _: None)
    assert loop.scheduler.pacer is not None
    assert engine.num_steps > 10
    ids = [loop.submit([prompt], GREEDY)[0] for prompt in asked]
    while step(loop, answers):
        pass
    assert [answers[request] for request in ids] == [greedy(FakeEngine(), prompt, 12) for prompt in asked]
