"""Text in pieces: whole characters, and nothing of a stop string."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.detokenize import Detokenizer, StopMatcher, TextStream
from qtool.runtime.tokenizer import Tokenizer

TEXTS = [
    "naïve café — 你好, мир! 👩‍👩‍👧 done",
    "\u200dé\u0301",
    "  two  spaces\n\n\ttab ",
    "\U0001d518\U0001d52b",
    "plain",
]


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_show_half_a_character(
    text: str, byte_tokenizer: Tokenizer
) -> None:
    tokens = byte_tokenizer.encode(text)
    shown = pieces(byte_tokenizer, tokens, byte_tokenizer.encode("Say it:"))
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_left_incomplete_shows_as_one_replacement_at_the_end(byte_tokenizer: Tokenizer) -> None:
    tokens = byte_tokenizer.encode("ok 你")[:-1]
    shown = pieces(byte_tokenizer, tokens, byte_tokenizer.encode("x"))
    assert "".join(shown[:-1]) == "ok "
    assert shown[-1] == "\ufffd"


def test_a_character_that_begins_in_the_prompt_is_shown_when_it_is_whole(byte_tokenizer: Tokenizer) -> None:
    tokens = byte_tokenizer.encode("ok 你!")
    shown = pieces(byte_tokenizer, tokens[-2:], tokens[:-2])
    assert shown == ["你", "!", ""]


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 319), max_size=24), prompt=st.sampled_from(["", "x", "a prompt"]))
def test_pieces_of_any_tokens_join_to_what_decoding_all_gives(
    tokens: list[int], prompt: str, byte_tokenizer: Tokenizer
) -> None:
    shown = pieces(byte_tokenizer, tokens, byte_tokenizer.encode(prompt))
    assert "".join(shown) == byte_tokenizer.decode(tokens)


def test_a_leading_space_that_a_sentencepiece_decoder_drops_is_kept(spm_tokenizer: Tokenizer) -> None:
    prompt, tokens = spm_tokenizer.encode("hello"), spm_tokenizer.encode("world you")
    assert spm_tokenizer.decode(tokens) == "world you"
    assert "".join(pieces(spm_tokenizer, tokens, prompt)) == " world you"


def outcome(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for chunk in chunks:
        shown += matcher.push(chunk)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.finish(), None


stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@settings(max_examples=400, deadline=None)
@given(stops=stop_lists, text=st.text("abc", max_size=24), cuts=st.lists(st.integers(0, 24), max_size=8))
def test_stops_do_not_depend_on_how_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(edges)]
    shown, matched = outcome(stops, chunks)
    assert (shown, matched) == outcome(stops, [text]) == outcome(stops, list(text))
    if matched is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)


def test_text_is_held_back_only_while_it_can_become_a_stop() -> None:
    matcher = StopMatcher(["END.", "ENOUGH"])
    shown = [matcher.push(piece) for piece in ("the E", "N", "T", " EN", "D", "!")]
    assert shown == ["the ", "", "ENT", " ", "", "END!"]


def test_a_stop_across_tokens_and_characters_cuts_the_text_before_it(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, byte_tokenizer.encode("x"), ["好,"])
    shown = ""
    for token in byte_tokenizer.encode("你好, 世界"):
        shown += stream.push(token)
        if stream.stopped:
            break
    assert (shown, stream.stopped) == ("你", True)


def test_what_was_held_for_a_stop_is_shown_when_the_sequence_ends(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, byte_tokenizer.encode("x"), ["bcd"])
    shown = "".join(stream.push(token) for token in byte_tokenizer.encode("abc"))
    assert (shown, stream.finish()) == ("a", "bc")


def test_a_stop_string_within_the_first_min_tokens_is_text(byte_tokenizer: Tokenizer) -> None:
    tokens = byte_tokenizer.encode("xSTOP and STOP", add_special_tokens=False)
    assert len(tokens) > 6
    stream = TextStream(byte_tokenizer, [], ["STOP"], min_tokens=5)
    text = ""
    for token in tokens:
        text += stream.push(token)
        if stream.stopped:
            break
    assert text == "xSTOP and "
