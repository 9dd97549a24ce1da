"""What an answer has to look like: the formats in which clients say it, as one kind of grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from qtool.runtime.request import ParameterError

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,16}"}
"""Whitespace between JSON's tokens is free but bounded: models that are unsure print it without end."""


@dataclass(frozen=True)
class Grammar:
    """A grammar that is written down but not compiled."""

    param: str
    """The request's field that it came in, for errors."""
    definition: str
    """llguidance's own format."""


def json_object(param: str) -> Grammar:
    """Any JSON object."""
    return json_schema(param, {"type": "object"})


def json_schema(param: str, schema: Mapping[str, object]) -> Grammar:
    """JSON that fits a schema. A keyword that can't be enforced is refused when the grammar is compiled."""
    schema = {**schema, "x-guidance": JSON_OPTIONS}
    return Grammar(param, LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def regex(param: str, pattern: str) -> Grammar:
    """Text that a regular expression matches from its first to its last character (Rust's syntax)."""
    return Grammar(param, LLMatcher.grammar_from_regex(pattern))


def choice(param: str, texts: Sequence[str]) -> Grammar:
    """One of several texts."""
    if not texts or "" in texts:
        raise ParameterError(param, "must be a list of one or more texts, none of them empty")
    return lark(param, "start: " + " | ".join(map(json.dumps, texts)))


def lark(param: str, text: str) -> Grammar:
    """A context-free grammar in llguidance's Lark syntax."""
    return Grammar(param, LLMatcher.grammar_from_lark(text))


def lark_or_gbnf(param: str, text: str) -> Grammar:
    """A context-free grammar in Lark's syntax or in llama.cpp's GBNF."""
    try:
        return lark(param, any_to_lark(text))
    except Exception as error:  # the converter raises whatever its parser trips over
        raise ParameterError(param, f"is neither a Lark nor a GBNF grammar: {error}") from error
