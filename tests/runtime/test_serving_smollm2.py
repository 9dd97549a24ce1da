"""The same answers however they are computed, on the real model through the openvino engine."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from qtool.compile.build import compile_engine
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.loops import answers
from tests.runtime.served import serving

NUM_TOKENS = 16
QUESTIONS = [
    "List the first five primes, then explain what a prime number is and why there is no end of them.",
    "Write a haiku about the sea, then one about the mountains in winter, and say which you like.",
    "Why is the sky blue? " * 12,
    "What is the capital of France?",
    "Name three colours.",
    "Translate 'good morning' into German.",
]
"""The first two cross a block of 32 tokens while they answer, so that a full pool has to preempt."""


@pytest.fixture(scope="module")
def engine_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "smollm2"
    compile_engine(smollm2, "openvino", folder)
    return folder


@pytest.fixture(scope="module")
def engine(engine_folder: Path) -> Engine:
    return open_engine(engine_folder, kv_cache_tokens=4096, threads=2)


@pytest.fixture(scope="module")
def tokenizer(engine_folder: Path) -> Tokenizer:
    return Tokenizer.load(engine_folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batched_chunked_and_preempted_answers_are_those_of_each_prompt_alone(
    temperature: float, engine: Engine, engine_folder: Path, prompts: list[list[int]]
) -> None:
    asked = [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, top_p=0.9, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    one_by_one = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512)
    alone, _ = answers(engine, asked, one_by_one)
    assert len({tuple(tokens) for tokens in alone}) == len(asked)
    assert answers(engine, asked, SchedulerConfig(8, 512)) == (alone, 0)
    assert answers(engine, asked, SchedulerConfig(8, 17))[0] == alone
    tiny_pool = open_engine(engine_folder, kv_cache_tokens=5 * 32, threads=2)
    preempted, num_preemptions = answers(tiny_pool, asked, SchedulerConfig(8, 64))
    assert preempted == alone
    assert num_preemptions > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cached_answers_and_choices_are_those_of_each_prompt_alone(
    temperature: float, engine: Engine, prompts: list[list[int]]
) -> None:
    shared = prompts[2][:70]
    asked = [
        (shared + prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    uncached, _ = answers(engine, asked, SchedulerConfig(1, 512, prefix_caching=False))
    found: dict[int, list[int]] = defaultdict(list)
    loop = EngineLoop(engine, SchedulerConfig(8, 512), lambda _: None)
    ids = []
    for prompt, params in [*asked, *asked]:  # the second time, the whole prompt is cached
        ids.append(loop.submit([prompt], params)[0])
        for _ in range(3):
            _step(loop, found)
    choices = loop.submit([asked[0][0]], replace(asked[0][1], n=3))
    while _step(loop, found):
        pass
    assert [found[request_id] for request_id in ids] == uncached * 2
    assert loop.stats().num_hit_tokens > 64 * len(asked) + sum(len(prompt) - 33 for prompt, _ in asked)
    assert found[choices[0]] == uncached[0]
    assert len({tuple(found[choice]) for choice in choices}) == (3 if temperature else 1)
    assert loop.stats().num_free_blocks == engine.num_blocks


def _step(loop: EngineLoop, found: dict[int, list[int]]) -> bool:
    if not loop.receive(wait=False):
        return False
    for output in loop.step():
        assert output.token is not None
        found[output.request_id].append(output.token)
    return True


def test_prompt_logprobs_are_those_of_the_models_own_forward_pass(
    engine: Engine, smollm2: Path, prompts: list[list[int]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = prompts[0]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    loop = EngineLoop(engine, SchedulerConfig(4, 17), lambda _: None)
    loop.submit([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1))
    outputs = []
    while loop.receive(wait=False):
        outputs += loop.step()
    report = outputs[0].prompt_logprobs
    assert report is not None
    for place, entry in enumerate(report[1:], 1):
        assert entry is not None
        # The engine's weights are rounded to f16 at most; its logits differ by some 1e-2 at most.
        assert entry.logprob == pytest.approx(float(wanted[place - 1, prompt[place]]), abs=0.05)
        assert entry.top[0][1] == pytest.approx(float(wanted[place - 1].max()), abs=0.05)


def test_a_served_greedy_chat_is_what_transformers_generates_streamed_or_not(
    engine: Engine, tokenizer: Tokenizer, smollm2: Path, prompts: list[list[int]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        made = model.generate(torch.tensor([prompts[2]]), max_new_tokens=NUM_TOKENS, do_sample=False)
    wanted = tokenizer.decode(made[0, len(prompts[2]) :].tolist())
    with serving(engine, tokenizer) as served, served.openai() as client:
        messages = [{"role": "user", "content": QUESTIONS[2]}]
        asked = {"model": "model", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert whole.choices[0].message.content == streamed == wanted
