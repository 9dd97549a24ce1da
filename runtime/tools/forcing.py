"""Grammars that force calls: what `tool_choice` "required" or one named tool asks for."""

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
    calls = [_call_schema(tool, format_.arguments_key) for tool in tools]
    call: dict[str, object] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    marker = _terminal(format_.marker, tokenizer)
    if format_.in_array:
        array: dict[str, object] = {"type": "array", "items": call, "minItems": 1}
        if not parallel:
            array["maxItems"] = 1
        return grammar.lark("tools", f"start: {marker} {_json_rule(array)}")
    if not format_.marker:
        more = f' ("{format_.separator} " call)*' if parallel else ""
        return grammar.lark("tools", f"start: call{more}\ncall: {_json_rule(call)}")
    more = ' ("\\n" call)*' if parallel else ""
    end = _terminal(format_.end, tokenizer)
    body = f'{marker} "\\n" {_json_rule(call)} "\\n" {end}'
    return grammar.lark("tools", f"start: call{more}\ncall: {body}")


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
