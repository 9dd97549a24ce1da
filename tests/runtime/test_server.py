"""The HTTP API over a real socket, through the openai client and by hand."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.served import Served, serving

USER = [{"role": "user", "content": "Say it"}]


@pytest.fixture(scope="module")
def served(byte_tokenizer: Tokenizer) -> Iterator[Served[FakeEngine]]:
    with serving(FakeEngine(num_blocks=64), byte_tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served[FakeEngine]) -> Iterator[OpenAI]:
    with served.openai() as found:
        yield found


def text(tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """The greedy answer's text. Decoded whole: it holds no end-of-sequence token in these tests."""
    return tokenizer.decode(greedy(FakeEngine(), tokenizer.encode(prompt), num_tokens))


def lines(response: httpx.Response) -> list[Any]:
    """The events of a stream, [DONE] as None."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [None if event == "[DONE]" else json.loads(event) for event in events]


def post(served: Served[FakeEngine], path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{path}", json={"model": "model", **body}, timeout=60)


def test_models_and_health_answer(served: Served[FakeEngine], client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "qtool"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")
    health = httpx.get(f"{served.url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


def test_a_completion_is_the_engines_text_with_usage(client: OpenAI, byte_tokenizer: Tokenizer) -> None:
    done = client.completions.create(model="model", prompt="Once", max_tokens=9, temperature=0)
    assert done.choices[0].text == text(byte_tokenizer, "Once", 9)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    num_prompt = len(byte_tokenizer.encode("Once"))
    assert done.usage.to_dict() == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 9,
        "total_tokens": num_prompt + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_prompts_and_token_ids_give_a_choice_each(
    stream: bool, client: OpenAI, byte_tokenizer: Tokenizer
) -> None:
    texts = ["Once", "upon a", "time"]
    ids = [byte_tokenizer.encode(prompt) for prompt in texts]
    wanted = [text(byte_tokenizer, prompt, 7) for prompt in texts]
    for prompt in (texts, ids):
        made = client.completions.create(
            model="model", prompt=prompt, max_tokens=7, temperature=0, stream=stream
        )
        found = ["", "", ""]
        for chunk in made if stream else [made]:
            for choice in chunk.choices:
                found[choice.index] += choice.text
        assert found == wanted
    alone = client.completions.create(model="model", prompt=ids[1], max_tokens=7, temperature=0)
    assert [choice.text for choice in alone.choices] == wanted[1:2]


def test_a_streamed_chat_has_the_exact_shape_of_chunks(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    body = {"messages": USER, "max_tokens": 6, "temperature": 0, "stream": True, "cache_salt": "own"}
    response = post(served, "chat/completions", **body, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = lines(response)
    assert events.pop() is None
    envelope = {key: events[0][key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    assert envelope["object"] == "chat.completion.chunk"
    assert envelope["id"].startswith("chatcmpl-")
    choice = {"index": 0, "logprobs": None}
    opening = {
        **choice,
        "delta": {"role": "assistant", "content": "", "refusal": None},
        "finish_reason": None,
    }
    assert events[0] == {**envelope, "choices": [opening], "usage": None}
    for event in events[1:-2]:
        delta = {"content": event["choices"][0]["delta"]["content"]}
        assert event == {
            **envelope,
            "choices": [{**choice, "delta": delta, "finish_reason": None}],
            "usage": None,
        }
    ending = {**choice, "delta": {}, "finish_reason": "length"}
    assert events[-2] == {**envelope, "choices": [ending], "usage": None}
    num_prompt = len(byte_tokenizer.encode_chat(USER))
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": 6,
        "total_tokens": num_prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert events[-1] == {**envelope, "choices": [], "usage": usage}
    plain = lines(post(served, "chat/completions", **body))
    assert all("usage" not in event for event in plain[:-1])


def test_a_streamed_completion_has_the_exact_shape_of_chunks(served: Served[FakeEngine]) -> None:
    events = lines(post(served, "completions", prompt="Once", max_tokens=3, temperature=0, stream=True))
    assert events.pop() is None
    for event in events:
        assert event.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        assert event["object"] == "text_completion"
        assert event["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + [
        "length"
    ]


@pytest.mark.parametrize("stop", [None, ["e"], ["zz", "\ufffd", " "]])
@pytest.mark.parametrize("seed", range(4))
def test_streamed_is_what_is_not_streamed(seed: int, stop: list[str] | None, client: OpenAI) -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": seed, "top_p": 0.9}):
        asked: dict[str, Any] = {"model": "model", "max_tokens": 30, "stop": stop, **sampling}
        messages = [{"role": "user", "content": f"Question {seed}"}]
        whole = client.chat.completions.create(messages=messages, **asked)
        content, reason, completion_tokens = "", None, None
        options = {"include_usage": True}
        for chunk in client.chat.completions.create(
            messages=messages, stream=True, stream_options=options, **asked
        ):
            for choice in chunk.choices:
                assert reason is None
                content += choice.delta.content or ""
                reason = choice.finish_reason
            if chunk.usage:
                completion_tokens = chunk.usage.completion_tokens
        assert whole.usage is not None
        assert (content, reason, completion_tokens) == (
            whole.choices[0].message.content,
            whole.choices[0].finish_reason,
            whole.usage.completion_tokens,
        )


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI, byte_tokenizer: Tokenizer) -> None:
    whole = text(byte_tokenizer, "Once", 30)
    stop = whole[len(whole) // 2 :][:2]
    done = client.completions.create(
        model="model", prompt="Once", max_tokens=30, temperature=0, stop=stop, logit_bias=None
    )
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.completion_tokens < 30


def test_a_stop_string_that_only_the_last_token_completes_is_the_reason(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    first_half = byte_tokenizer.encode("é")[0]  # shows as U+FFFD when nothing follows
    body = {"prompt": "x", "max_tokens": 1, "allowed_token_ids": [first_half], "stop": "\ufffd"}
    choice = post(served, "completions", **body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_the_end_of_sequence_ends_the_answer_unless_it_is_ignored(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    (end,) = byte_tokenizer.eos_token_ids
    prompts = (byte_tokenizer.encode(f"Prompt {number}") for number in range(5000))
    prompt = next(prompt for prompt in prompts if end in greedy(FakeEngine(), prompt, 4)[2:])
    tokens = greedy(FakeEngine(), prompt, 12)
    done = post(served, "completions", prompt=prompt, max_tokens=12, temperature=0).json()
    assert done["choices"][0]["finish_reason"] == "stop"
    assert done["choices"][0]["text"] == byte_tokenizer.decode(tokens[: tokens.index(end)])
    assert done["usage"]["completion_tokens"] == tokens.index(end) + 1
    done = post(served, "completions", prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True).json()
    assert done["usage"]["completion_tokens"] == 12


def test_content_parts_developer_and_max_completion_tokens_are_taken(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "it"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    done = post(served, "chat/completions", messages=messages, max_completion_tokens=5, temperature=0).json()
    plain = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say\nit"}]
    wanted = greedy(FakeEngine(), byte_tokenizer.encode_chat(plain), 5)
    assert done["choices"][0]["message"] == {
        "role": "assistant",
        "content": byte_tokenizer.decode(wanted),
        "refusal": None,
    }


def test_a_chat_without_max_tokens_may_fill_the_context(served: Served[FakeEngine]) -> None:
    done = post(served, "chat/completions", messages=USER, temperature=0, ignore_eos=True).json()
    assert done["usage"]["total_tokens"] == served.engine.max_context


def test_fields_that_ask_for_nothing_are_taken(served: Served[FakeEngine]) -> None:
    nothing = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "top_logprobs": None,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "someone",
        "metadata": {"a": "b"},
        "stop": None,
        "seed": None,
        "stream_options": None,
    }
    assert post(served, "chat/completions", messages=USER, max_tokens=1, **nothing).status_code == 200
    completion = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None}
    assert post(served, "completions", prompt="x", max_tokens=1, **completion).status_code == 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("completions", {"prompt": "x", "max_tokenz": 3}, "max_tokenz", "did you mean 'max_tokens'"),
    ("completions", {"prompt": "x", "n": 0}, "n", "1 to 128"),
    ("completions", {"prompt": "x", "best_of": 2}, "best_of", "2 is not supported"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "0 to 20"),
    ("completions", {"prompt": "x", "presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ("completions", {"prompt": "x", "min_p": -0.1}, "min_p", "0 to 1"),
    ("completions", {"prompt": "x", "logit_bias": {"one": 1}}, "logit_bias", "no token id"),
    ("completions", {"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias", "token id 320"),
    ("completions", {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids", "token id -1"),
    ("completions", {"prompt": "x", "bad_words": [""]}, "bad_words", "empty"),
    ("completions", {"prompt": "x", "bad_words": ["a"] * 257}, "bad_words", "at most 256"),
    ("completions", {"prompt": "x", "timeout": 0}, "timeout", "greater than 0"),
    ("completions", {"prompt": "x", "guided_regex": "(a"}, "guided_regex", "cannot be enforced"),
    ("completions", {"prompt": "x", "guided_choice": []}, "guided_choice", "one or more"),
    (
        "completions",
        {"prompt": "x", "guided_choice": ["a"], "guided_regex": "a"},
        "guided_choice",
        "and guided_regex both",
    ),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ("completions", {"prompt": "x", "temperature": "hot"}, "temperature", "valid number"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
    ("completions", {"prompt": "x", "top_p": 0}, "top_p", "above 0"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ("completions", {"prompt": "x", "max_tokens": True}, "max_tokens", "integer"),
    ("completions", {"prompt": "x", "max_tokens": 256}, "max_tokens", "context is 256"),
    ("completions", {"prompt": "x", "stop": ["a", 3]}, "stop[1]", "string"),
    ("completions", {"prompt": "x", "stop": [""]}, "stop", "empty"),
    ("completions", {"prompt": "x", "stop": list("abcde")}, "stop", "at most 4"),
    ("completions", {"prompt": "x", "seed": 1.5}, "seed", "integer"),
    ("completions", {"prompt": "x", "seed": 2**70}, "seed", "64 bits"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (
        "completions",
        {"prompt": "x", "stream": True, "stream_options": {"usage": True}},
        "usage",
        "is no field",
    ),
    ("completions", {}, "prompt", "required"),
    ("completions", {"prompt": None}, "prompt", "required"),
    ("completions", {"prompt": ""}, "prompt", "empty"),
    ("completions", {"prompt": []}, "prompt", "must be a string"),
    ("completions", {"prompt": ["a", ""]}, "prompt", "empty"),
    ("completions", {"prompt": ["a", [3]]}, "prompt", "must be a string"),
    ("completions", {"prompt": [3, True]}, "prompt", "must be a string"),
    ("completions", {"prompt": [3, 320]}, "prompt", "token id 320 is not in 0"),
    ("completions", {"prompt": [-1]}, "prompt", "token id -1"),
    ("completions", {"prompt": 5}, "prompt", "must be a string"),
    ("completions", {"prompt": "x" * 1_000_000}, "prompt", "can't fit into 256 tokens"),
    ("completions", {"prompt": "x", "best_of": True}, "best_of", "not supported"),
    ("chat/completions", {"messages": []}, "messages", "empty"),
    ("chat/completions", {}, "messages", "required"),
    ("chat/completions", {"messages": "hi"}, "messages", "list"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]", "dictionary"),
    ("chat/completions", {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "'system'"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages", "no content"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
        "messages",
        "must be a string or parts",
    ),
    (
        "chat/completions",
        {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4},
        "max_tokens",
        "differs",
    ),
    (
        "chat/completions",
        {"messages": USER, "tools": [{"type": "function"}]},
        "tools[0].function",
        "required",
    ),
    ("chat/completions", {"messages": USER, "tools": [TOOL]}, "tools", "knows of no tools"),
    ("chat/completions", {"messages": USER, "tools": [TOOL, TOOL]}, "tools", "two functions"),
    ("chat/completions", {"messages": USER, "tool_choice": "required"}, "tool_choice", "no tools"),
    (
        "chat/completions",
        {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "names 'g'",
    ),
    ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs", "set logprobs"),
    ("chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 21}, "logprobs", "0 to 20"),
    ("chat/completions", {"messages": USER, "continue_final_message": True}, "continue_final_message", "new"),
    (
        "chat/completions",
        {"messages": USER, "response_format": {"type": "json_schema"}},
        "response_format",
        "",
    ),
    (
        "chat/completions",
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}},
        },
        "response_format",
        "cannot be enforced",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "tool", "content": "3"}]},
        "messages",
        "tool_call_id belongs to",
    ),
    (
        "chat/completions",
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "messages",
        "are not JSON",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x" * 2000}]},
        "max_tokens",
        "context is 256",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x" * 1_000_000}]},
        "messages",
        "can't fit into 256 tokens",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
def test_a_bad_request_is_400_and_names_the_field(
    path: str, body: dict[str, Any], param: str, message: str, served: Served[FakeEngine]
) -> None:
    response = post(served, path, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_exclude_each_other_are_the_requests_fault(
    stream: bool, served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    rules = {"allowed_token_ids": byte_tokenizer.encode("a", add_special_tokens=False), "bad_words": ["a"]}
    response = post(served, "completions", prompt="x", stream=stream, **rules)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "rules (bad_words, allowed_token_ids) together forbid every one" in error["message"]


def test_what_is_no_request_at_all_gets_an_error_object_too(served: Served[FakeEngine]) -> None:
    url = f"{served.url}/v1/completions"
    headers = {"content-type": "application/json"}
    half_a_pair = b'{"model": "model", "prompt": "\\ud800"}'
    deep = b'{"model": "model", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}"
    for content in (b"{", b"", b"[1]", b"\xff\xfe", b'"x"', b"[" * 100_000, half_a_pair, deep):
        response = httpx.post(url, content=content, headers=headers)
        assert response.status_code == 400, content
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{served.url}/v1/nothing").json()["error"]["message"] == "POST /v1/nothing: Not Found"
    assert httpx.get(url).status_code == 405
    unknown = post(served, "completions", model="other", prompt="x")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_concurrent_requests_get_their_own_answers(client: OpenAI, byte_tokenizer: Tokenizer) -> None:
    asked = [f"Number {number}" for number in range(20)]

    def ask(prompt: str) -> str:
        done = client.completions.create(
            model="model", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        return done.choices[0].text

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, asked))
    assert found == [text(byte_tokenizer, prompt, 12) for prompt in asked]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(stream: bool, byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    with serving(engine, byte_tokenizer) as served:
        engine.gate.clear()  # the engine is in a step for as long as the client is there
        body = {"model": "model", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.5)
        wait(lambda: not served.client._queues)
        engine.gate.set()
        wait(lambda: served.client.loop.stats().num_free_blocks == 64)
        assert served.client.loop.stats().num_running == 0
        assert engine.num_steps <= 2


def test_a_client_that_goes_away_in_mid_stream_frees_its_blocks(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    with serving(engine, byte_tokenizer) as served:
        body = {"model": "model", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=20) as response:
            next(response.iter_lines())
            engine.gate.clear()
        wait(lambda: not served.client._queues)
        engine.gate.set()
        wait(lambda: served.client.loop.stats().num_free_blocks == 64)


def test_a_stop_string_frees_the_blocks_before_max_tokens(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    with serving(engine, byte_tokenizer) as served:
        engine.seconds_a_step = 0.005
        stop = text(byte_tokenizer, "Once", 12)[3]
        body = {"prompt": "Once", "temperature": 0, "stop": stop, "ignore_eos": True, "max_tokens": 200}
        assert post(served, "completions", **body).json()["choices"][0]["finish_reason"] == "stop"
        wait(lambda: served.client.loop.stats().num_free_blocks == 64)
        assert engine.num_steps < 100


def test_an_engine_failure_is_an_error_for_the_client_not_a_hang(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    engine.fail_at = 3
    with serving(engine, byte_tokenizer) as served, served.openai() as client:
        stream = client.completions.create(model="model", prompt="x", max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed: RuntimeError"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the engine failed") as caught:
            client.completions.create(model="model", prompt="x")
        assert caught.value.status_code == 503
        assert httpx.get(f"{served.url}/health").status_code == 503


def test_a_failure_before_the_first_token_sets_the_status(byte_tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        engine = FakeEngine()
        engine.fail_at = 0
        with serving(engine, byte_tokenizer) as served:
            response = post(served, "completions", prompt="x", stream=stream)
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
