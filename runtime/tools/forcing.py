"""Grammars of tool calls: those that `tool_choice` "required" or one named tool forces, and those that the
model may make in its text, where tools are strict.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qtool.runtime.structured import grammar
from qtool.runtime.structured.grammar import Grammar
from qtool.runtime.tokenizer import Tokenizer
from qtool.runtime.tools.formats import ToolFormat


@dataclass(frozen=True)
class Tool:
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, object]
    """A JSON schema of its arguments."""


def forced_calls(
    format_: ToolFormat, tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool
) -> Grammar:
    """A grammar of one call of these tools, or of several when `parallel`, and of nothing else."""
    body = _body(format_, tools, tokenizer, '"\\n"', parallel=parallel)
    call = f"call: {_terminal(format_.marker, tokenizer)} {body}" if format_.marker else f"call: {body}"
    more = ""
    if parallel and not format_.in_array:
        separator = f"{format_.separator} " if format_.separator else "\n"
        more = f" ({json.dumps(separator)} call)*"
    return grammar.lark("tools", f"start: call{more}\n{call}")


def free_calls(
    format_: ToolFormat, tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool
) -> Grammar:
    """A grammar of any text in which whatever begins a call is followed by one of these tools' calls.

    Without a marker, an answer that begins with a brace is a call: nothing else could tell it from text.
    """
    body = _body(format_, tools, tokenizer, r"/[ \t\r\n]{0,4}/", parallel=parallel)
    if not format_.marker:
        prefix = f"({_terminal(format_.prefix, tokenizer)})?" if format_.prefix else ""
        more = f" ({json.dumps(format_.separator + ' ')} call)*" if parallel else ""
        text = r"TEXT: /[ \t\r\n]*([^ \t\r\n{](.|\n)*)?/"
        return grammar.lark("tools", f"start: TEXT | {prefix} call{more}\ncall: {body}\n{text}")
    calls = "call*" if parallel and not format_.in_array else "call?"
    marker = _terminal(format_.marker, tokenizer)
    if marker.startswith("<"):  # a token of its own, which text can't hold
        call = f"call: TEXT {marker} {body}"
    else:
        call = f"call: opening {body}\nopening[lazy]: TEXT {marker}"
    return grammar.lark("tools", rf"start: {calls} TEXT" + f"\n{call}\n" + r"TEXT: /(.|\n)*/")


def _body(
    format_: ToolFormat, tools: Sequence[Tool], tokenizer: Tokenizer, space: str, *, parallel: bool
) -> str:
    """What follows the marker: one call, or all of them where one marker opens an array. `space` is what
    stands around a call between two marks."""
    calls = [_call_schema(tool, format_.arguments_key) for tool in tools]
    call: dict[str, object] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if format_.in_array:
        array: dict[str, object] = {"type": "array", "items": call, "minItems": 1}
        if not parallel:
            array["maxItems"] = 1
        return _json_rule(array)
    if not format_.marker:
        return _json_rule(call)
    return f"{space} {_json_rule(call)} {space} {_terminal(format_.end, tokenizer)}"


def _call_schema(tool: Tool, arguments_key: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, arguments_key: tool.parameters or {"type": "object"}},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _json_rule(schema: Mapping[str, object]) -> str:
    """A schema within a Lark grammar, on one line."""
    return "%json " + json.dumps({**schema, "x-guidance": grammar.JSON_OPTIONS})


def _terminal(text: str, tokenizer: Tokenizer) -> str:
    """A text, by its token where it is a special one: such a token is not the text's characters."""
    token_id = tokenizer.special_id(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
