"""Calls written as JSON objects, the core of every format."""

import json
import re

from qtool.runtime.tools.events import ToolCall

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*(?P<close>"?)|[{}\[\]]', re.DOTALL)
"""A string, whose closing quote may not have come yet, or a bracket outside of strings."""


class MalformedCallError(ValueError):
    """Text that no further character can turn into a call."""


def skip_whitespace(text: str, start: int) -> int:
    """The first place from `start` on that is not whitespace."""
    found = _WHITESPACE.match(text, start)
    assert found is not None
    return found.end()


def end_of_value(text: str, start: int) -> int | None:
    """Where the JSON object or array that begins at `start` ends, by its brackets; None while it is open."""
    depth = 0
    for found in _STRUCTURE.finditer(text, start):
        if found[0].startswith('"'):
            if not found["close"]:
                return None
            continue
        depth += 1 if found[0] in "{[" else -1
        if depth == 0:
            return found.end()
    return None


def parse_value(text: str) -> object:
    """A JSON value. Raises MalformedCallError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError from error


def as_call(value: object) -> ToolCall:
    """The call that a JSON object {"name": ..., "arguments": {...}} stands for.

    Llama's models write "parameters" for "arguments"; some leave them out when there are none, and some
    encode them twice. Raises MalformedCallError for another value.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise MalformedCallError
    return ToolCall(value["name"], arguments_text(value.get("arguments", value.get("parameters", {}))))


def arguments_text(arguments: object) -> str:
    """Arguments as the API gives them: the text of a JSON object. Raises MalformedCallError for another."""
    if isinstance(arguments, str):
        arguments = parse_value(arguments)
    if not isinstance(arguments, dict):
        raise MalformedCallError
    return json.dumps(arguments, ensure_ascii=False)
