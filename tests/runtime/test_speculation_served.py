"""Speculation as users and operators see it: usage, metrics, options and the report."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from qtool.errors import UsageError
from qtool.runtime.request import SamplingParams
from qtool.runtime.speculation.contract import Draft, Drafter, DraftRequest
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.measure import serve_all
from qtool.runtime.speculation.ngram import NgramDrafter
from qtool.runtime.speculation.prompts import read_prompts, refuse_misfits
from qtool.runtime.speculation.report import (
    DrafterReport,
    Speedup,
    make_report,
    num_runs,
    recommend,
)
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.drafters import ScriptedDrafter, knowing, rubbish
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.served import Served, serving
from tests.runtime.test_speculation_loop import FLAT, LoopingEngine

COMPLETION = {"model": "model", "prompt": "Once", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(byte_tokenizer: Tokenizer) -> Iterator[Served[FakeEngine]]:
    engine = FakeEngine(num_blocks=64)
    guess = knowing(lambda text, count: greedy(engine, list(text), count), 320, 0.7)
    using = Speculator([ScriptedDrafter(guess)], StepTimes(FLAT), 320, num_tokens=4)
    with serving(engine, byte_tokenizer, speculator=using) as found:
        yield found


def test_usage_says_how_many_drafts_were_accepted_whole_and_streamed(served: Served[FakeEngine]) -> None:
    url = f"{served.url}/v1/completions"
    before = samples(served)
    whole = httpx.post(url, json={**COMPLETION, "n": 2}).json()
    usage = whole["usage"]["completion_tokens_details"]
    assert whole["usage"]["completion_tokens"] == 24
    assert 0 < usage["accepted_prediction_tokens"] < 24
    assert usage["rejected_prediction_tokens"] > 0
    after = samples(served)

    def counted(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    total = usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]
    assert counted("qtool_draft_tokens_total") == total
    assert counted("qtool_accepted_tokens_total") == usage["accepted_prediction_tokens"]
    by_place = [counted(f'qtool_draft_position_tokens_total{{position="{place}"}}') for place in range(4)]
    assert sum(by_place) == total
    assert counted("qtool_acceptance_length_tokens_sum") == (
        usage["accepted_prediction_tokens"] + counted("qtool_acceptance_length_tokens_count")
    )
    assert counted("qtool_draft_length_tokens_sum") == total
    assert counted("qtool_drafting_seconds_total") > 0
    streamed = httpx.post(
        url, json={**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    ).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]


def test_usage_names_drafts_wherever_speculation_is_on(served: Served[FakeEngine]) -> None:
    usage = httpx.post(f"{served.url}/v1/completions", json={**COMPLETION, "max_tokens": 1}).json()["usage"]
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


def test_without_drafts_usage_has_the_shape_that_it_had(byte_tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(num_blocks=64), byte_tokenizer) as plain:
        usage = httpx.post(f"{plain.url}/v1/completions", json=COMPLETION).json()["usage"]
    assert "completion_tokens_details" not in usage


def test_a_stop_string_within_accepted_drafts_ends_the_answer_before_it(served: Served[FakeEngine]) -> None:
    url = f"{served.url}/v1/completions"
    whole = httpx.post(url, json=COMPLETION).json()["choices"][0]["text"]
    middle = whole[len(whole) // 2 : len(whole) // 2 + 2]
    ended = httpx.post(url, json={**COMPLETION, "stop": [middle]}).json()
    assert ended["choices"][0]["text"] == whole[: whole.index(middle)]
    assert ended["choices"][0]["finish_reason"] == "stop"
    details = ended["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] <= ended["usage"]["completion_tokens"]


def test_no_request_however_it_ends_has_more_accepted_than_generated_tokens(
    served: Served[FakeEngine],
) -> None:
    url = f"{served.url}/v1/completions"
    asked = {**COMPLETION, "prompt": "Many", "max_tokens": 300}
    before = samples(served)
    for _ in range(3):
        with httpx.stream("POST", url, json={**asked, "stream": True}) as answer:
            for _ in zip(range(4), answer.iter_lines(), strict=False):
                pass
    httpx.post(url, json={**asked, "max_tokens": 20, "stop": ["e", "a"]})
    httpx.post(url, json={**asked, "max_tokens": 20})
    after = samples(served)
    generated, lengths, accepted = (
        after[name] - before.get(name, 0.0)
        for name in (
            "qtool_generation_tokens_total",
            "qtool_acceptance_length_tokens_sum",
            "qtool_accepted_tokens_total",
        )
    )
    assert 0 < accepted < lengths <= generated


def samples(served: Served[FakeEngine]) -> dict[str, float]:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in found}


def test_a_report_finds_what_pays_and_what_does_not() -> None:
    engine = LoopingEngine(num_blocks=200, max_context=1000)
    times = StepTimes(FLAT)
    drafters: dict[str, list[Drafter]] = {
        "ngram": [NgramDrafter()],
        "rubbish": [ScriptedDrafter(rubbish(320))],
    }
    calls: list[None] = []
    params = SamplingParams(max_tokens=60, temperature=0)
    prompts = [[5, 6, 7], [8, 9], [3]]
    report = make_report(engine, times, drafters, prompts, params, [1, 3], 2, lambda: calls.append(None))
    assert len(calls) == num_runs(2, 2, 2)
    ngram, wrong = report.drafters
    assert (ngram.name, wrong.name) == ("ngram", "rubbish")
    assert ngram.answers_differ == wrong.answers_differ == 0
    lengths = [setting.acceptance_length for setting in ngram.settings]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 3
    assert max(wrong.rates) < 0.2
    # By the curve alone all rows cost the same, so tokens a step are what is gained.
    assert ngram.settings[-1].expected[1] == pytest.approx(ngram.settings[-1].tokens_per_step, rel=0.1)


def test_a_report_expects_of_short_drafts_no_more_than_they_have() -> None:
    engine = LoopingEngine(num_blocks=200, max_context=1000)
    right = knowing(lambda text, n: greedy(engine, list(text), n), 320, 1.0)

    def guess(generator: np.random.Generator, request: DraftRequest) -> Draft:
        return right(generator, request).shortened(1 if generator.random() < 0.75 else request.num_tokens)

    params = SamplingParams(max_tokens=200, temperature=0)
    drafters: dict[str, list[Drafter]] = {"short": [ScriptedDrafter(guess)]}
    report = make_report(engine, StepTimes(FLAT), drafters, [[5, 6, 7]], params, [1], 1, lambda: None)
    (short,) = report.drafters
    assert min(short.rates) == 1
    longest = short.settings[-1]
    assert longest.acceptance_length == pytest.approx(2 + 0.25 * (longest.num_tokens - 1), abs=0.6)
    assert longest.expected[1] == pytest.approx(longest.tokens_per_step, rel=0.1)


def test_the_fastest_by_all_batch_sizes_is_recommended_or_none() -> None:
    def measured(name: str, *speedups: float) -> DrafterReport:
        found = {batch: Speedup(one, one - 0.1, one + 0.1) for batch, one in enumerate(speedups, 1)}
        return DrafterReport(name, [], 0.0, 0.0, [], found, 0)

    assert recommend([measured("a", 1.5, 0.9), measured("b", 1.2, 1.2)]) == "b"
    assert recommend([measured("a", 1.2, 0.85), measured("b", 0.9, 0.9)]) == "off"
    assert recommend([measured("a", 1.05, 1.06)]) == "off"  # it may as well have lost
    assert recommend([]) == "off"


def test_prompts_are_read_from_text_and_json_lines_or_refused(
    byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("Hello\n\nWorld\n")
    chats = tmp_path / "prompts.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n{"prompt": "World"}\n')
    prompts = read_prompts(lines, byte_tokenizer)
    assert list(prompts) == [f"{lines}:1", f"{lines}:3"]
    first, second = prompts.values()
    assert list(read_prompts(chats, byte_tokenizer).values()) == [first, byte_tokenizer.encode("World")]
    assert second != byte_tokenizer.encode("World")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere", byte_tokenizer)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "prompts.jsonl: holds no prompts"),
        ("x", "prompts.jsonl:3: is not valid JSON"),
        ("[" * 100_000, "prompts.jsonl:3: is not valid JSON"),
        ('{"text": "x"}', "prompts.jsonl:3: has neither"),
        ('{"messages": []}', "prompts.jsonl:3: has neither"),
        ('{"messages": ["x"]}', "prompts.jsonl:3: has neither"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    line: str, problem: str, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"\n\n{line}\n")
    with pytest.raises(UsageError) as refused:
        read_prompts(prompts, byte_tokenizer)
    assert problem in str(refused.value)


def test_a_chat_that_the_model_cannot_take_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    with pytest.raises(UsageError, match=r"prompts\.txt:1: messages: this model has no chat template"):
        read_prompts(prompts, Tokenizer.load(tmp_path))


@pytest.mark.parametrize(("length", "problem"), [(0, "prompt"), (1000, "1008, but the KV cache holds 64")])
def test_a_prompt_that_cannot_be_served_is_named(length: int, problem: str) -> None:
    with pytest.raises(UsageError, match=f"prompts.txt:7: .*{problem}"):
        refuse_misfits({"prompts.txt:7": [5] * length}, FakeEngine(), SamplingParams(max_tokens=8))


def test_the_time_to_the_first_token_leaves_out_the_wait_for_requests_before() -> None:
    measured = serve_all(
        FakeEngine(64, block_size=4), None, [[5, 6, 7]] * 40, SamplingParams(max_tokens=9), 1
    )
    assert len(measured.ttft_ms) == 40
    assert max(measured.ttft_ms[20:]) < 1000 * measured.seconds / 4
