"""Structured output and tool calls over HTTP, through the openai client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine, ScriptedEngine
from tests.runtime.served import serving
from tests.runtime.test_server import USER

BEGINS = "<|im_start|>assistant\n"
HERMES_TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} in <tool_call>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA, "strict": True},
}
LOOSE_WEATHER: Any = {"type": "function", "function": {**WEATHER["function"], "strict": False}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The byte-level tokenizer, with a template that knows of tools."""
    folder = tmp_path_factory.mktemp("with_tools")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def random(tokenizer: Tokenizer) -> Iterator[OpenAI]:
    """A model without sense, which only a grammar keeps in line."""
    with (
        serving(FakeEngine(num_blocks=512, max_context=2000), tokenizer) as served,
        served.openai() as client,
    ):
        yield client


def scripted(text: str, tokenizer: Tokenizer) -> ScriptedEngine:
    (end,) = tokenizer.eos_token_ids
    return ScriptedEngine(tokenizer.encode(text), tokenizer.encode(BEGINS), end)


FORMATS: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}},
        "schema",
    ),
    ({"extra_body": {"guided_json": SCHEMA}}, "schema"),
    ({"extra_body": {"guided_regex": "[ab]{3}c"}}, "[ab]{3}c"),
    ({"extra_body": {"guided_choice": ["yes", "no"]}}, "yes|no"),
    ({"extra_body": {"guided_grammar": 'root ::= "x" root "y" | "z"'}}, "x*zy*"),
]


@pytest.mark.parametrize(("how", "wanted"), FORMATS)
def test_answers_have_the_format_that_was_asked_for_streamed_or_not(
    how: dict[str, Any], wanted: str, random: OpenAI
) -> None:
    asked: dict[str, Any] = {"model": "model", "messages": USER, "max_tokens": 900, "seed": 3, **how}
    whole = random.chat.completions.create(**asked).choices[0]
    stream = random.chat.completions.create(**asked, stream=True)
    streamed = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert whole.finish_reason == "stop"
    assert whole.message.content is not None
    assert streamed == whole.message.content
    if wanted == "schema":
        assert json.loads(whole.message.content)["city"] in {"Paris", "Rome"}
    else:
        assert re.fullmatch(wanted, whole.message.content)


def test_choices_have_the_format_each_on_its_own(random: OpenAI) -> None:
    done = random.completions.create(
        model="model", prompt="x", n=4, seed=1, max_tokens=12, extra_body={"guided_regex": "[a-z]{12}"}
    )
    texts = {choice.text for choice in done.choices}
    assert len(texts) == 4
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)


def test_any_json_object_may_be_cut_by_max_tokens(random: OpenAI) -> None:
    done = random.chat.completions.create(
        model="model", messages=USER, max_tokens=5, seed=1, response_format={"type": "json_object"}
    )
    assert (done.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_without_sense_calls_what_it_has_to(choice: Any, parallel: bool, random: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "model",
        "messages": USER,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 1200,
        "seed": 11,
    }
    done = random.chat.completions.create(**asked).choices[0]
    assert done.finish_reason == "tool_calls"
    assert done.message.content is None
    calls = done.message.tool_calls or []
    assert len(calls) == 1 or parallel
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}
    assert streamed_calls(random, asked) == [
        (call.function.name, call.function.arguments) for call in calls if call.type == "function"
    ]


def streamed_calls(client: OpenAI, asked: dict[str, Any]) -> list[tuple[str, str]]:
    """Calls as a client puts them together from deltas."""
    found: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                call = found.setdefault(delta.index, ["", ""])
                assert delta.function is not None
                call[0] += delta.function.name or ""
                call[1] += delta.function.arguments or ""
    return [(call[0], call[1]) for call in found.values()]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_text_are_found_and_numbered(stream: bool, tokenizer: Tokenizer) -> None:
    answer = f'Let me see.{CALL}\n<tool_call>{{"name": "clock"}}</tool_call>'
    tools = [LOOSE_WEATHER, CLOCK]
    asked: dict[str, Any] = {"model": "model", "messages": USER, "tools": tools, "temperature": 0}
    wanted = [("weather", '{"city": "Paris", "days": 3}'), ("clock", "{}")]
    with serving(scripted(answer, tokenizer), tokenizer) as served, served.openai() as client:
        if stream:
            assert streamed_calls(client, asked) == wanted
            return
        done = client.chat.completions.create(**asked).choices[0]
        assert (done.message.content, done.finish_reason) == ("Let me see.", "tool_calls")
        calls = [call for call in done.message.tool_calls or [] if call.type == "function"]
        assert [(call.function.name, call.function.arguments) for call in calls] == wanted
        assert len({call.id for call in calls}) == 2
        assert all(call.id.startswith("call_") for call in calls)
        one = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
        assert len(one.message.tool_calls or []) == 1
        none = client.chat.completions.create(**asked, tool_choice="none").choices[0]
        assert (none.message.content, none.message.tool_calls) == (answer, None)


def test_a_chat_with_calls_and_their_results_is_rendered(tokenizer: Tokenizer) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'},
    }
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ]
    with serving(scripted("It is sunny.", tokenizer), tokenizer) as served, served.openai() as client:
        done = client.chat.completions.create(
            model="model", messages=messages, tools=[WEATHER], temperature=0
        )
        assert done.choices[0].message.content == "It is sunny."
        assert done.usage is not None
        function = {"name": "weather", "arguments": {"city": "Rome", "days": 1}}
        tool = {key: value for key, value in WEATHER["function"].items() if key != "strict"}
        rendered = (
            f"Tools: {json.dumps({'type': 'function', 'function': tool})} in <tool_call>\n"
            "<|im_start|>user\nSay it<|im_end|>\n"
            f"<|im_start|>assistant\n<tool_call>{json.dumps(function)}</tool_call><|im_end|>\n"
            "<|im_start|>tool\nSunny<|im_end|>\n<|im_start|>assistant\n"
        )
        assert done.usage.prompt_tokens == len(tokenizer.encode(rendered, add_special_tokens=False))


def test_an_answer_goes_on_where_the_last_message_ends(tokenizer: Tokenizer) -> None:
    messages: Any = [*USER, {"role": "assistant", "content": "It is "}]
    with serving(scripted("It is sunny.", tokenizer), tokenizer) as served, served.openai() as client:
        done = client.chat.completions.create(
            model="model",
            messages=messages,
            temperature=0,
            extra_body={"add_generation_prompt": False, "continue_final_message": True},
        )
    assert done.choices[0].message.content == " sunny."


def test_a_strict_tool_is_held_to_its_schema_where_the_model_is_free_to_call(tokenizer: Tokenizer) -> None:
    wrong = 'So: <tool_call>\n{"name": "weather", "arguments": {"city": "London", "days": 12}}\n</tool_call>'
    asked: dict[str, Any] = {"model": "model", "messages": USER, "max_tokens": 300, "temperature": 0}
    with serving(scripted(wrong, tokenizer), tokenizer) as served, served.openai() as client:
        free = client.chat.completions.create(**asked, tools=[LOOSE_WEATHER]).choices[0].message
        held = client.chat.completions.create(**asked, tools=[WEATHER]).choices[0].message
    assert free.content == "So: "
    assert (held.content or "").startswith("So: ")  # off its script, this model goes on after the call
    assert arguments(free) == {"city": "London", "days": 12}
    assert arguments(held)["city"] in {"Paris", "Rome"}
    assert arguments(held)["days"] <= 9


def arguments(message: Any) -> dict[str, Any]:
    """Those of the first call."""
    found: dict[str, Any] = json.loads(message.tool_calls[0].function.arguments)
    return found
