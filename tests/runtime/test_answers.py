"""What answers hold beside their text: log-probabilities, echoes, choices, usage; and deadlines."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.served import Served, serving
from tests.runtime.test_server import USER, lines, post, wait


@pytest.fixture(scope="module")
def served(byte_tokenizer: Tokenizer) -> Iterator[Served[FakeEngine]]:
    with serving(FakeEngine(num_blocks=128), byte_tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served[FakeEngine]) -> Iterator[OpenAI]:
    with served.openai() as found:
        yield found


def logprob(prefix: list[int], token: int) -> float:
    logits = FakeEngine().logits(np.array(prefix)).astype(np.float64)
    return float(logits[token] - np.log(np.exp(logits).sum()))


def test_a_completions_logprobs_are_the_models(served: Served[FakeEngine], byte_tokenizer: Tokenizer) -> None:
    prompt = byte_tokenizer.encode("Once")
    tokens = greedy(FakeEngine(), prompt, 9)
    done = post(served, "completions", prompt=prompt, max_tokens=9, temperature=0, logprobs=2).json()
    choice = done["choices"][0]
    found = choice["logprobs"]
    assert found.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    wanted = [logprob(prompt + tokens[:place], token) for place, token in enumerate(tokens)]
    # float32 sums over 320 logits against float64 ones
    assert found["token_logprobs"] == pytest.approx(wanted, abs=1e-5)
    for token, value, top, offset in zip(*found.values(), strict=True):
        assert len(top) == 2
        assert top[token] == max(top.values()) == value
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_an_echo_has_the_prompts_logprobs_as_lm_eval_asks_for_them(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    prompt = byte_tokenizer.encode("Grüße 🙂 an alle")
    asked = {"prompt": [prompt], "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    done = post(served, "completions", max_tokens=1, **asked).json()
    choice = done["choices"][0]
    (token,) = greedy(FakeEngine(), prompt, 1)
    assert choice["text"].startswith("Grüße 🙂 an alle")
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    wanted = [logprob(prompt[:place], prompt[place]) for place in range(1, len(prompt))]
    assert found["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-5)
    assert found["token_logprobs"][-1] == pytest.approx(logprob(prompt, token), abs=1e-5)
    for token_text, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token_text.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token_text)
    streamed = lines(post(served, "completions", max_tokens=1, stream=True, **asked))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == choice["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed[:-1]]
    for key, values in found.items():
        assert [value for part in parts if part for value in part[key]] == values


def test_no_tokens_with_echo_is_the_prompt_alone(served: Served[FakeEngine]) -> None:
    done = post(served, "completions", prompt="Once", echo=True, logprobs=0, max_tokens=0).json()
    assert done["choices"][0]["text"] == "Once"
    assert "".join(done["choices"][0]["logprobs"]["tokens"]) == "Once"
    assert done["usage"]["completion_tokens"] == 0
    refused = post(served, "completions", prompt="Once", max_tokens=0)
    assert refused.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stop", [None, "e"])
def test_a_chats_logprobs_are_openais_streamed_or_not(
    stop: str | None, client: OpenAI, byte_tokenizer: Tokenizer
) -> None:
    asked: dict[str, Any] = {
        "model": "model",
        "messages": USER,
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": stop,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    first = whole.logprobs.content[0]
    prompt = byte_tokenizer.encode_chat(USER)
    token = greedy(FakeEngine(), prompt, 1)[0]
    assert bytes(first.bytes or []) == byte_tokenizer.token_bytes(token)
    assert first.logprob == pytest.approx(logprob(prompt, token), abs=1e-5)
    assert len(first.top_logprobs) == 3
    assert first.top_logprobs[0].logprob == first.logprob
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs and choice.logprobs.content:
                streamed += choice.logprobs.content
    assert streamed == whole.logprobs.content
    if stop is None:
        joined = b"".join(bytes(entry.bytes or []) for entry in streamed)
        assert joined.decode(errors="replace") == whole.message.content
    plain = client.chat.completions.create(model="model", messages=USER, max_tokens=1)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_those_of_their_own_seeds(
    stream: bool, served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    prompts = ["Once", "Twice"]

    def texts(**more: Any) -> list[str]:
        response = post(served, "completions", **asked, **more)
        bodies = lines(response)[:-1] if more.get("stream") else [response.json()]
        found: dict[int, str] = {}
        for body in bodies:
            for choice in body["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return [found[index] for index in sorted(found)]

    together = texts(prompt=prompts, n=3, seed=5, stream=stream)
    assert together == [texts(prompt=prompt, seed=5 + choice)[0] for prompt in prompts for choice in range(3)]
    assert len(set(together)) == 6


def test_choices_of_a_chat_count_the_prompt_once(client: OpenAI, byte_tokenizer: Tokenizer) -> None:
    done = client.chat.completions.create(
        model="model", messages=USER, n=4, seed=1, max_tokens=7, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage is not None
    num_prompt = len(byte_tokenizer.encode_chat(USER))
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (num_prompt, 28)


def test_continuous_usage_grows_with_the_stream(served: Served[FakeEngine]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    events = lines(post(served, "chat/completions", **body, stream=True, stream_options=options))[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 6)


def test_tokens_that_the_prefix_cache_held_are_reported_unless_salted(served: Served[FakeEngine]) -> None:
    body = {"prompt": "A prompt that is asked twice", "max_tokens": 1, "temperature": 0}

    def cached(**more: str) -> int:
        usage = post(served, "completions", **body, **more).json()["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(found, int)
        return found

    assert cached() == 0
    again = cached()
    assert again > 0
    assert again % served.engine.block_size == 0
    assert cached(cache_salt="other") == 0
    metrics = httpx.get(f"{served.url}/metrics").text
    hits = next(
        line for line in metrics.splitlines() if line.startswith("qtool_prefix_cache_hit_tokens_total")
    )
    assert float(hits.split()[1]) >= again


def test_sampling_fields_reach_the_sampler(client: OpenAI, byte_tokenizer: Tokenizer) -> None:
    best = greedy(FakeEngine(), byte_tokenizer.encode("Once"), 1)[0]

    def first(**more: Any) -> str:
        done = client.completions.create(
            model="model", prompt="Once", max_tokens=1, temperature=0, logprobs=0, extra_body=more
        )
        assert done.choices[0].logprobs is not None
        return str((done.choices[0].logprobs.tokens or [])[0])

    usual = first()
    other = (best + 1) % 300 + 10
    assert first(logit_bias={str(best): -100}) != usual
    spelled = byte_tokenizer.token_bytes(other).decode(errors="replace")
    if "\ufffd" not in spelled:
        assert first(allowed_token_ids=[other]) == spelled
    assert first(min_p=1.0, temperature=1.0) == usual
    assert first(guided_choice=["yes"]) in {"y", "ye", "yes"}


@pytest.mark.parametrize("how", ["field", "header"])
def test_a_request_is_given_up_at_its_deadline(how: str, byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    engine.seconds_a_step = 0.02
    with serving(engine, byte_tokenizer) as served, served.openai() as client:
        body = {"model": "model", "prompt": "x", "max_tokens": 200, "ignore_eos": True}
        more: dict[str, Any] = {"timeout": 0.3} if how == "field" else {}
        headers = {"X-Request-Timeout": "0.3"} if how == "header" else {}
        url = f"{served.url}/v1/completions"
        response = httpx.post(url, json={**body, **more}, headers=headers, timeout=20)
        assert response.status_code == 504
        assert "own limit" in response.json()["error"]["message"]
        streamed = httpx.post(url, json={**body, **more, "stream": True}, headers=headers, timeout=20)
        assert streamed.status_code == 200
        assert "own limit" in lines(streamed)[-2]["error"]["message"]
        late = client.completions.create
        with pytest.raises(openai.BadRequestError, match="wanted seconds"):
            late(model="model", prompt="x", extra_headers={"X-Request-Timeout": "soon"})
        with pytest.raises(openai.BadRequestError, match="above 0"):
            late(model="model", prompt="x", extra_headers={"X-Request-Timeout": "-1"})
        wait(lambda: served.client.loop.stats().num_free_blocks == 64)
