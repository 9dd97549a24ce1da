"""The text subset of /v1/responses, through the openai client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.served import Served, serving


@pytest.fixture(scope="module")
def served(byte_tokenizer: Tokenizer) -> Iterator[Served[FakeEngine]]:
    with serving(FakeEngine(num_blocks=256, max_context=900), byte_tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served[FakeEngine]) -> Iterator[OpenAI]:
    with served.openai() as found:
        yield found


def test_a_response_is_the_chats_text(client: OpenAI, byte_tokenizer: Tokenizer) -> None:
    made = client.responses.create(
        model="model", input="Say it", instructions="Be brief", max_output_tokens=9, temperature=0
    )
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say it"}]
    prompt = byte_tokenizer.encode_chat(chat)
    assert made.output_text == byte_tokenizer.decode(greedy(FakeEngine(), prompt, 9))
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(prompt), 9)


def test_a_streamed_response_adds_up_to_the_whole_one(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "model",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
            {"role": "user", "content": "Say it"},
        ],
        "max_output_tokens": 20,
        "temperature": 0,
    }
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == 20


def test_a_response_has_the_format_that_was_asked_for(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    made = client.responses.create(
        model="model", input="x", text={"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    )
    assert isinstance(json.loads(made.output_text)["ok"], bool)
    assert made.status == "completed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": "x", "temperature": -1}, "temperature"),
    ],
)
def test_what_is_beyond_text_is_refused(body: dict[str, Any], param: str, served: Served[FakeEngine]) -> None:
    response = httpx.post(f"{served.url}/v1/responses", json={"model": "model", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_failure_in_mid_stream_is_an_event(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine()
    engine.fail_at = 3
    with serving(engine, byte_tokenizer) as served, served.openai() as client:
        last = list(client.responses.create(model="model", input="x", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "engine failed" in last.response.error.message
