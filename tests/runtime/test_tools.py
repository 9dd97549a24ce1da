"""Tool calls in text, however the text is cut into pieces; and grammars that force them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from qtool.errors import UsageError
from qtool.runtime.structured.compiler import GrammarCompiler
from qtool.runtime.tokenizer import Tokenizer
from qtool.runtime.tools.events import Content, Event, ToolCall
from qtool.runtime.tools.forcing import Tool, forced_calls, free_calls
from qtool.runtime.tools.formats import FORMATS, HERMES, LLAMA3_JSON, MISTRAL, detect_format, tool_format
from qtool.runtime.tools.parsers import make_parser
from tests.runtime.test_structured import VOCAB_SIZE, allowed, walk

A = ToolCall("a", '{"x": 1}')
B = ToolCall("b", '{"y": ["}</tool_call>", "\\"]{"], "ü": {}}')
WHOLE: list[tuple[str, str, str, list[ToolCall]]] = [
    ("hermes", "plain < text <tool", "plain < text <tool", []),
    ("hermes", f'<tool_call>\n{{"name": "a", "arguments": {A.arguments}}}\n</tool_call>', "", [A]),
    (
        "hermes",
        f'Now: <tool_call>{{"arguments": {A.arguments}, "name": "a"}}</tool_call>\n<tool_call>\n'
        f'{{"name": "b", "arguments": {B.arguments}}}\n</tool_call>\n ',
        "Now: ",
        [A, B],
    ),
    ("hermes", '<tool_call>{"name": "a"}</tool_call> so', " so", [ToolCall("a", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {', '<tool_call>{"name": "a", "arguments": {', []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    ("hermes", '<tool_call>{"name": "a"}{</tool_call>', '<tool_call>{"name": "a"}{</tool_call>', []),
    ("llama3_json", f'{{"name": "a", "parameters": {A.arguments}}}', "", [A]),
    ("llama3_json", f'<|python_tag|> {{"name": "a", "parameters": {A.arguments}}}', "", [A]),
    (
        "llama3_json",
        f'{{"name": "a", "parameters": {A.arguments}}}; {{"name": "b", "parameters": {B.arguments}}}\n',
        "",
        [A, B],
    ),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '{"name": "a", "parameters": [1]}', '{"name": "a", "parameters": [1]}', []),
    ("llama3_json", ' I say {"name": "a"}', ' I say {"name": "a"}', []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", '{"name": "a"', '{"name": "a"', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "a", "arguments": {A.arguments}}}]', "", [A]),
    (
        "mistral",
        f'Hm[TOOL_CALLS][{{"name": "a", "arguments": {A.arguments}}}, {{"name": "b", "arguments": '
        f"{json.dumps(B.arguments)}}}]",
        "Hm",
        [A, B],
    ),
    ("mistral", f"[TOOL_CALLS]a[ARGS]{A.arguments}[TOOL_CALLS]b{B.arguments}", "", [A, B]),
    ("mistral", "[TOOL_CALLS][3]", "[TOOL_CALLS][3]", []),
    ("mistral", "[TOOL_CALLS]what is {", "[TOOL_CALLS]what is {", []),
]


def read(format_: str, pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    parser = make_parser(tool_format(format_), ["a", "b"])
    events: list[Event] = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish()
    text = "".join(event.text for event in events if isinstance(event, Content))
    return text, [event for event in events if isinstance(event, ToolCall)]


@pytest.mark.parametrize(("format_", "text", "content", "calls"), WHOLE)
def test_calls_are_found_whole_and_character_by_character(
    format_: str, text: str, content: str, calls: list[ToolCall]
) -> None:
    assert read(format_, [text]) == (content, calls)
    assert read(format_, list(text)) == (content, calls)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_cuts_change_nothing(format_: str, data: st.DataObject) -> None:
    parts = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "a"}', "{", "}", "["]
    parts += ["]", ";", '"', "\\", " ", "a", "[ARGS]", '{"name": "b", "arguments": {"x": "}"}}']
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(format_, pieces) == read(format_, [text])


def test_text_before_a_marker_is_passed_on_at_once() -> None:
    parser = make_parser(HERMES, [])
    assert parser.push("Let me see <") == [Content("Let me see ")]
    assert parser.push("b") == [Content("<b")]


def test_the_format_is_read_off_the_chat_template() -> None:
    assert detect_format("{{ tools }} <tool_call>") is HERMES
    assert detect_format("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert detect_format("{{ tools }} <|python_tag|>") is LLAMA3_JSON
    assert detect_format("{{ messages }} <tool_call>") is None
    assert detect_format("{{ tools }}") is None
    assert detect_format(None) is None
    with pytest.raises(UsageError, match="did you mean 'hermes'"):
        tool_format("herms")


WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock", {})


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_forced_call_is_read_back_by_its_parser(
    name: str, parallel: bool, byte_tokenizer: Tokenizer
) -> None:
    (end,) = byte_tokenizer.eos_token_ids
    compiler = GrammarCompiler(byte_tokenizer, VOCAB_SIZE)
    grammar = forced_calls(tool_format(name), [WEATHER], byte_tokenizer, parallel=parallel)
    counts = set()
    for seed in range(8):
        text = byte_tokenizer.decode(walk(compiler.compile(grammar)(), end, seed, 2000))
        parser = make_parser(tool_format(name), ["weather"])
        events = [*parser.push(text), *parser.finish()]
        for event in events:
            assert isinstance(event, ToolCall), text
            assert event.name == "weather"
            assert 0 <= json.loads(event.arguments)["days"] <= 9
        counts.add(len(events))
    assert counts == {1} if not parallel else len(counts) > 1


def test_one_of_several_tools_is_forced_whatever_its_arguments(byte_tokenizer: Tokenizer) -> None:
    (end,) = byte_tokenizer.eos_token_ids
    compiler = GrammarCompiler(byte_tokenizer, VOCAB_SIZE)
    grammar = forced_calls(HERMES, [WEATHER, CLOCK], byte_tokenizer, parallel=False)
    constraint = compiler.compile(grammar)()
    for token in byte_tokenizer.encode('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'):
        constraint.accept(token)
    assert constraint.finished
    assert end is not None


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_strict_tool_is_held_to_its_schema_once_a_call_begins(
    name: str, parallel: bool, byte_tokenizer: Tokenizer
) -> None:
    (end,) = byte_tokenizer.eos_token_ids
    format_ = tool_format(name)
    compiler = GrammarCompiler(byte_tokenizer, VOCAB_SIZE)
    grammar = free_calls(format_, [WEATHER, CLOCK], byte_tokenizer, parallel=parallel)
    text = compiler.compile(grammar)()
    for token in byte_tokenizer.encode("It is 5 < 6 [TOOL] <tool {and} no call"):
        text.accept(token)
    assert end in allowed(text)
    beginning = f"Let me see. {format_.marker}" if format_.marker else "{"
    seen = set()
    for seed in range(8):
        constraint = compiler.compile(grammar)()
        for token in byte_tokenizer.encode(beginning):
            constraint.accept(token)
        assert end not in allowed(constraint)
        # The first call to its end; what may follow it is text again.
        answer, generator = beginning, np.random.default_rng(seed)
        parser = make_parser(format_, ["weather", "clock"])
        events = list(parser.push(beginning))
        while not any(isinstance(event, ToolCall) for event in events):
            token = int(generator.choice(allowed(constraint)))
            constraint.accept(token)
            piece = byte_tokenizer.decode([token])
            answer += piece
            events += parser.push(piece)
            assert len(answer) < 4000, answer
        (call, *_) = [event for event in events if isinstance(event, ToolCall)]
        seen.add(call.name)
        if call.name == "weather":
            assert 0 <= json.loads(call.arguments)["days"] <= 9
    assert seen == {"weather", "clock"}


def test_a_marker_that_is_a_token_of_its_own_begins_a_call_and_its_text_does_not(
    tokenizer_folder: Path,
) -> None:
    fast = FastTokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    fast.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(fast, {}, None, frozenset({1}))
    (marker,) = tokenizer.encode("<tool_call>")
    for parallel in (False, True):
        grammar = free_calls(HERMES, [WEATHER], tokenizer, parallel=parallel)
        constraint = GrammarCompiler(tokenizer, VOCAB_SIZE).compile(grammar)()
        for token in tokenizer.encode("Let me see. "):
            constraint.accept(token)
        assert {marker, 1} <= set(allowed(constraint))
        constraint.accept(marker)
        assert {tokenizer.decode([token]).strip() for token in allowed(constraint)} == {"", "{"}
        call = '\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>'
        for token in tokenizer.encode(call):
            assert token in allowed(constraint)
            constraint.accept(token)
        assert (marker in allowed(constraint)) == parallel
        assert 1 in allowed(constraint)
