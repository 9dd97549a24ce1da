"""How families of models write tool calls."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qtool.errors import UsageError, nearest
from qtool.runtime.tools.events import ToolCall
from qtool.runtime.tools.json_calls import (
    MalformedCallError,
    arguments_text,
    as_call,
    end_of_value,
    parse_value,
    skip_whitespace,
)


@dataclass(frozen=True)
class Read:
    """Calls that a text begins with, and how many of its characters they take."""

    calls: list[ToolCall]
    length: int


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing calls."""

    name: str
    marker: str
    """What begins a call; empty where the whole answer is a call or none is."""
    read: Callable[[str], Read | None]
    """Reads what follows the marker: None while it is not complete, MalformedCallError if it can't be."""
    prefix: str = ""
    """What may stand before a call that has no marker."""
    separator: str = ""
    """What stands between calls that have no marker."""
    end: str = ""
    """What ends a call, after its JSON."""
    arguments_key: str = "arguments"
    in_array: bool = False
    """Whether one marker is followed by an array of all calls."""
    id_length: int = 24


def _read_hermes(text: str) -> Read | None:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, again for each call."""
    start = skip_whitespace(text, 0)
    if start == len(text):
        return None
    if text[start] != "{":
        raise MalformedCallError
    end = end_of_value(text, start)
    if end is None:
        return None
    call = as_call(parse_value(text[start:end]))
    close = skip_whitespace(text, end)
    if text.startswith(HERMES.end, close):
        return Read([call], close + len(HERMES.end))
    if not HERMES.end.startswith(text[close:]):
        raise MalformedCallError
    return None


def _read_llama(text: str) -> Read | None:
    """`{"name": ..., "parameters": {...}}` and nothing else; several are separated by semicolons."""
    end = end_of_value(text, 0)
    return None if end is None else Read([as_call(parse_value(text[:end]))], end)


def _read_mistral(text: str) -> Read | None:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or since 2025 `[TOOL_CALLS]name[ARGS]{...}`."""
    start = skip_whitespace(text, 0)
    if start == len(text):
        return None
    if text[start] == "[":
        end = end_of_value(text, start)
        if end is None:
            return None
        values = parse_value(text[start:end])
        if not isinstance(values, list):
            raise MalformedCallError
        return Read([as_call(value) for value in values], end)
    brace = text.find("{", start)
    if brace < 0:
        return None
    name = text[start:brace].removesuffix(_MISTRAL_ARGS).strip()
    if not name or not name.replace("_", "a").replace("-", "a").replace(".", "a").isalnum():
        raise MalformedCallError
    end = end_of_value(text, brace)
    if end is None:
        return None
    return Read([ToolCall(name, arguments_text(parse_value(text[brace:end])))], end)


_MISTRAL_ARGS = "[ARGS]"

HERMES = ToolFormat("hermes", "<tool_call>", _read_hermes, end="</tool_call>")
LLAMA3_JSON = ToolFormat(
    "llama3_json", "", _read_llama, prefix="<|python_tag|>", separator=";", arguments_key="parameters"
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", _read_mistral, in_array=True, id_length=9)

FORMATS = {format_.name: format_ for format_ in (HERMES, LLAMA3_JSON, MISTRAL)}


def tool_format(name: str) -> ToolFormat:
    """The format of a name. Raises UsageError for an unknown one."""
    if name not in FORMATS:
        raise UsageError(f"tool call parser {name!r} is unknown; {nearest(name, FORMATS)}")
    return FORMATS[name]


def detect_format(chat_template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches its model, by what the template writes; None for none."""
    if chat_template is None or "tools" not in chat_template:
        return None
    signs: Iterable[tuple[str, ToolFormat]] = (
        (HERMES.marker, HERMES),
        (MISTRAL.marker, MISTRAL),
        (LLAMA3_JSON.prefix, LLAMA3_JSON),
        ('"parameters": dictionary', LLAMA3_JSON),
    )
    return next((format_ for sign, format_ in signs if sign in chat_template), None)
