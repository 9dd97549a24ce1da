"""Constraints by grammars, walked with random tokens: whatever they allow must fit the grammar."""

import json
import re

import numpy as np
import pytest

from qtool.errors import UsageError
from qtool.runtime.constraint import TokenConstraint, allowed_tokens, bitmask_width
from qtool.runtime.request import ParameterError
from qtool.runtime.structured import grammar
from qtool.runtime.structured.compiler import GrammarCompiler
from qtool.runtime.structured.grammar import Grammar
from qtool.runtime.tokenizer import Tokenizer

VOCAB_SIZE = 333
"""More than the tokenizer's 320, and no multiple of 32."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "größer", 'a"b']}, "maxItems": 3},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, VOCAB_SIZE)


def allowed(constraint: TokenConstraint) -> list[int]:
    row = np.full(bitmask_width(VOCAB_SIZE), -1, np.int32)
    constraint.fill_mask(row)
    return [int(token) for token in np.flatnonzero(allowed_tokens(row, VOCAB_SIZE))]


def walk(constraint: TokenConstraint, end: int, seed: int, limit: int = 400) -> list[int]:
    """Tokens drawn evenly from what is allowed, up to the end of the text."""
    generator = np.random.default_rng(seed)
    tokens: list[int] = []
    while not constraint.finished:
        token = int(generator.choice(allowed(constraint)))
        constraint.accept(token)
        if token == end:
            break
        tokens.append(token)
        assert len(tokens) < limit
    return tokens


@pytest.fixture(scope="module")
def end(byte_tokenizer: Tokenizer) -> int:
    (end,) = byte_tokenizer.eos_token_ids
    return end


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_schema_allows_fits_the_schema(
    seed: int, compiler: GrammarCompiler, byte_tokenizer: Tokenizer, end: int
) -> None:
    factory = compiler.compile(grammar.json_schema("response_format", SCHEMA))
    value = json.loads(byte_tokenizer.decode(walk(factory(), end, seed)))
    assert value.keys() <= {"name", "size", "tags"}
    assert len(value["name"]) <= 8
    assert type(value["size"]) is int
    assert -3 <= value["size"] <= 120
    assert set(value.get("tags", [])) <= {"red", "größer", 'a"b'}


@pytest.mark.parametrize("seed", range(5))
def test_texts_fit_their_expression(
    seed: int, compiler: GrammarCompiler, byte_tokenizer: Tokenizer, end: int
) -> None:
    pattern = "(ab|ü)[0-9]{2,3}x?"
    factory = compiler.compile(grammar.regex("guided_regex", pattern))
    assert re.fullmatch(pattern, byte_tokenizer.decode(walk(factory(), end, seed)))


def test_every_choice_is_reached_and_no_other_text(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer, end: int
) -> None:
    texts = ["yes", "yes, sir", 'a "quoted"\n\\text', "ü/🙂", "\x01"]
    factory = compiler.compile(grammar.choice("guided_choice", texts))
    found = {byte_tokenizer.decode(walk(factory(), end, seed)) for seed in range(60)}
    assert found == set(texts)


GBNF = 'root ::= "a" root "b" | "c"'
LARK = 'start: "a" start "b" | "c"'


@pytest.mark.parametrize("text", [GBNF, LARK])
def test_a_grammar_may_be_lark_or_gbnf(
    text: str, compiler: GrammarCompiler, byte_tokenizer: Tokenizer, end: int
) -> None:
    factory = compiler.compile(grammar.lark_or_gbnf("guided_grammar", text))
    for seed in range(5):
        made = byte_tokenizer.decode(walk(factory(), end, seed))
        depth = made.count("a")
        assert made == "a" * depth + "c" + "b" * depth


def test_the_end_is_allowed_exactly_where_the_text_may_end(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer, end: int
) -> None:
    constraint = compiler.compile(grammar.regex("guided_regex", "[0-9]{1,2}"))()
    assert end not in allowed(constraint)
    constraint.accept(byte_tokenizer.encode("7")[0])
    assert end in allowed(constraint)
    assert not constraint.finished
    constraint.accept(end)
    assert constraint.finished


def test_a_rollback_takes_drafts_back_even_past_the_end(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(grammar.choice("guided_choice", ["abcde", "abx"]))()
    before = allowed(constraint)
    tokens = byte_tokenizer.encode("abx")
    for token in tokens:
        constraint.accept(token)
    assert constraint.finished
    constraint.rollback(len(tokens))
    assert not constraint.finished
    assert allowed(constraint) == before


def test_a_grammar_that_fails_on_the_way_allows_nothing_and_is_not_finished(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(grammar.regex("guided_regex", "[0-9]+"))()
    constraint.accept(byte_tokenizer.encode("x")[0])  # as a limit would, it stops the matcher
    assert allowed(constraint) == []
    assert not constraint.finished


def test_choices_of_one_request_follow_their_own_texts(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    factory = compiler.compile(grammar.choice("guided_choice", ["ax", "bx"]))
    first, second = factory(), factory()
    first.accept(byte_tokenizer.encode("a")[0])
    assert byte_tokenizer.encode("b")[0] in allowed(second)


def test_no_token_beyond_the_tokenizers_is_allowed(compiler: GrammarCompiler) -> None:
    constraint = compiler.compile(grammar.regex("guided_regex", "(.|\n)*"))()
    assert max(allowed(constraint)) < 320


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "strin"},
        {"type": "object", "properties": {"a": 3}},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/$defs/none"},
        {"type": "string", "format": "colour"},
        {"type": "string", "pattern": "(?=a)b"},
        {"not": {"type": "string"}},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    wrong: dict[str, object], compiler: GrammarCompiler
) -> None:
    with pytest.raises(ParameterError, match="response_format: cannot be enforced") as caught:
        compiler.compile(grammar.json_schema("response_format", wrong))
    assert "\n" not in str(caught.value)


def test_a_schema_that_no_text_meets_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(ParameterError, match=r"response_format: .*no text meets it"):
        compiler.compile(grammar.json_schema("response_format", {"$ref": "#"}))


def test_other_grammars_that_are_invalid_are_refused(compiler: GrammarCompiler) -> None:
    def check(make: Grammar) -> None:
        compiler.compile(make)

    with pytest.raises(ParameterError, match="guided_regex"):
        check(grammar.regex("guided_regex", "(ab"))
    with pytest.raises(ParameterError, match="guided_grammar"):
        check(grammar.lark_or_gbnf("guided_grammar", "start: nothing"))
    with pytest.raises(UsageError, match="guided_grammar"):
        check(grammar.lark_or_gbnf("guided_grammar", "root ::= nothing"))
    for texts in ([], ["a", ""]):
        with pytest.raises(ParameterError, match="guided_choice"):
            check(grammar.choice("guided_choice", texts))
