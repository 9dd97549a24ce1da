"""Answers of the engine loop, over an engine that sees every mistake in a block table."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.logprobs import token_logprobs
from qtool.runtime.loop import EngineLoop, Output
from qtool.runtime.request import ParameterError, RequestOptions, SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.loops import GREEDY, generate, prompts, running, step


def test_batched_chunked_and_preempted_answers_are_those_of_each_prompt_alone() -> None:
    asked = [(prompt, GREEDY) for prompt in prompts(9)]
    wanted = [greedy(FakeEngine(), prompt, 12) for prompt, _ in asked]
    roomy = FakeEngine(num_blocks=200)
    assert generate(roomy, asked) == (wanted, 0)
    assert generate(roomy, asked, seqs=3, budget=5)[0] == wanted
    answers, preemptions = generate(FakeEngine(num_blocks=9), asked, budget=9)
    assert answers == wanted
    assert preemptions > 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 7),
    num_blocks=st.integers(8, 30),
    block_size=st.integers(4, 7),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 20),
)
def test_seeded_answers_depend_on_nothing_but_the_request(
    seed: int, count: int, num_blocks: int, block_size: int, seqs: int, spare: int
) -> None:
    asked = [
        (prompt, SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=number))
        for number, prompt in enumerate(prompts(count, seed))
    ]
    alone = [generate(FakeEngine(64), [one])[0][0] for one in asked]
    together, _ = generate(FakeEngine(num_blocks, block_size), asked, seqs, seqs + spare)
    assert together == alone


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8),
    num_blocks=st.integers(11, 40),
    block_size=st.integers(4, 7),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 20),
    n=st.integers(1, 3),
    data=st.data(),
)
def test_cached_answers_are_uncached_ones_whatever_is_shared_cancelled_or_evicted(
    lengths: list[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    seqs: int,
    spare: int,
    n: int,
    data: st.DataObject,
) -> None:
    engine = FakeEngine(num_blocks, block_size)
    loop = EngineLoop(engine, SchedulerConfig(seqs, seqs + spare), lambda _: None)
    answers: dict[int, list[int]] = defaultdict(list)
    wanted: dict[int, list[int]] = {}
    for number, (shared, own) in enumerate(lengths):
        prompt = [9] * shared + [number % 3 + 3] * own
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=number, n=n)
        options = RequestOptions(cache_salt=data.draw(st.sampled_from(["", "salt"])))
        for choice, request in enumerate(loop.submit([prompt], params, options)):
            wanted[request] = alone(prompt, number + choice)
        for _ in range(data.draw(st.integers(0, 6))):
            if loop.scheduler.running and data.draw(st.integers(0, 9)) == 0:
                loop.cancel(cancelled := loop.scheduler.running[0].id)
                wanted.pop(cancelled, None)
            step(loop, answers)
    while step(loop, answers):
        pass
    assert {request: answers[request] for request in wanted} == wanted
    assert loop.stats().num_free_blocks == num_blocks


@cache
def _alone(prompt: tuple[int, ...], seed: int) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=seed)
    return generate(FakeEngine(64), [(list(prompt), params)], prefix_caching=False)[0][0]


def alone(prompt: list[int], seed: int) -> list[int]:
    """The answer to a prompt that nothing is shared with."""
    return _alone(tuple(prompt), seed)


def test_choices_are_the_answers_of_consecutive_seeds_and_share_one_prompt() -> None:
    engine = FakeEngine(num_blocks=40)
    prompt = list(range(3, 25))
    answers: dict[int, list[int]] = defaultdict(list)
    loop = EngineLoop(engine, SchedulerConfig(8, 64), lambda _: None)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, n=3)
    ids = loop.submit([prompt], params)
    while step(loop, answers):
        pass
    assert [answers[request] for request in ids] == [alone(prompt, seed) for seed in (5, 6, 7)]
    assert engine.num_tokens == 22 + 2 + 3 * 11  # the last token of the prompt is computed for each


def run_all(
    engine: FakeEngine, prompt: list[int], params: SamplingParams, config: SchedulerConfig
) -> list[list[Output]]:
    """The outputs of each choice of a request, alone."""
    outputs: dict[int, list[Output]] = defaultdict(list)
    loop = EngineLoop(engine, config, lambda _: None)
    ids = loop.submit([prompt], params)
    while loop.receive(wait=False):
        for output in loop.step():
            outputs[output.request_id].append(output)
    return [outputs[request] for request in ids]


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 40), budget=st.integers(4, 30), n=st.integers(1, 2), seed=st.integers(0, 99))
def test_prompt_logprobs_are_those_of_every_prefix_however_the_prompt_is_cut(
    length: int, budget: int, n: int, seed: int
) -> None:
    engine = FakeEngine(num_blocks=40)
    prompt = np.random.default_rng(seed).integers(3, 320, length).tolist()
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2, logprobs=1, n=n)
    config = SchedulerConfig(4, budget)
    first, *others = run_all(engine, prompt, params, config)
    assert first[1].prompt_logprobs is None
    assert all(output.prompt_logprobs is None for choice in others for output in choice)
    found = first[0].prompt_logprobs
    assert found is not None
    assert found[0] is None
    wanted = [
        token_logprobs(engine.logits(np.array(prompt[:place])), prompt[place], 2)
        for place in range(1, length)
    ]
    assert list(found[1:]) == wanted
    expected = greedy(engine, prompt, 2)
    for choice in (first, *others):
        assert [output.token for output in choice] == expected
        assert [output.logprobs and output.logprobs.token for output in choice] == expected


def test_prompt_logprobs_bypass_the_cache_and_survive_preemption() -> None:
    prompt = list(range(3, 28))
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    engine = FakeEngine(num_blocks=20)
    loop = EngineLoop(engine, SchedulerConfig(4, 9), lambda _: None)
    outputs: list[Output] = []
    requests = [loop.submit([prompt], params)[0] for _ in range(2)]
    for number in range(40):
        if number == 2:
            loop.scheduler._preempt_last()
        if loop.receive(wait=False):
            outputs += loop.step()
    found = {output.request_id: output.prompt_logprobs for output in outputs if output.prompt_logprobs}
    assert loop.stats().num_hit_tokens == 0
    assert found.keys() == set(requests)
    assert all(report is not None and len(report) == 25 for report in found.values())
    assert found[requests[0]] == found[requests[1]]


def test_prompt_logprobs_of_a_prompt_that_would_make_a_huge_response_are_refused() -> None:
    loop = EngineLoop(FakeEngine(num_blocks=40_000, max_context=99_999), SchedulerConfig(), lambda _: None)
    with pytest.raises(ParameterError, match="420000 log-probabilities, and at most 200000"):
        loop.submit([[5] * 20_000], SamplingParams(prompt_logprobs=20))
    loop.submit([[5] * 20_000], SamplingParams(prompt_logprobs=0))


def test_a_request_that_names_a_token_the_model_lacks_is_refused() -> None:
    loop = EngineLoop(FakeEngine(), SchedulerConfig(), lambda _: None)
    with pytest.raises(ParameterError, match="token id 320"):
        loop.submit([[5]], SamplingParams(logit_bias={320: 1.0}))


@settings(max_examples=30, deadline=None)
@given(num_blocks=st.integers(8, 30), seqs=st.integers(1, 6), spare=st.integers(0, 20))
def test_penalties_bans_and_biases_depend_on_nothing_but_the_request(
    num_blocks: int, seqs: int, spare: int
) -> None:
    asked = [
        (prompt, replace(_ADJUSTING, seed=number)) for number, prompt in enumerate(prompts(5, longest=12))
    ]
    separate = [generate(FakeEngine(64), [one])[0][0] for one in asked]
    assert generate(FakeEngine(num_blocks), asked, seqs, seqs + spare)[0] == separate
    assert all(90 not in answer for answer in separate)


_ADJUSTING = SamplingParams(
    max_tokens=12,
    temperature=0.8,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias={90: 20.0, 91: 5.0},
    bad_words=((90,), (91, 91)),
    min_tokens=4,
)


def test_the_same_seed_repeats_and_another_differs() -> None:
    def answer(seed: int) -> list[int]:
        return generate(FakeEngine(), [([5, 6], SamplingParams(seed=seed))])[0][0]

    assert answer(1) == answer(1) != answer(2)


def test_a_stop_token_ends_the_sequence_with_reason_stop() -> None:
    third = greedy(FakeEngine(), [7, 8], 3)[-1]
    with running(FakeEngine()) as (loop, sink):
        params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=frozenset({third}))
        request = loop.submit([[7, 8]], params)[0]
        assert sink.result(request) == greedy(FakeEngine(), [7, 8], 3)
        assert sink.outputs[request][-1].finish_reason == "stop"
