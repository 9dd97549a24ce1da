"""Drafters: what they propose, and that the answers are the target's alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Floats, Step
from qtool.runtime.request import RequestOptions, SamplingParams, SequenceState
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.build import (
    SpeculationConfig,
    make_speculator,
    parse_count,
    parse_kind,
)
from qtool.runtime.speculation.contract import Draft, DraftRequest
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.draft_model import DraftModel, refuse_other_vocabulary
from qtool.runtime.speculation.measure import serve_all
from qtool.runtime.speculation.ngram import NgramDrafter, NgramIndex
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.steptime import StepLoad
from qtool.runtime.sweep import measure_change_ms
from qtool.runtime.tokenizer import Tokenizer
from tests.models import write_tiny
from tests.runtime.fake import FakeEngine
from tests.runtime.test_speculation_loop import ADJUSTING, FLAT, GREEDY, EvenThenEnd, prompts, run, tokens


def propose(drafter: NgramDrafter, text: Sequence[int], count: int = 4, salt: str = "") -> Draft:
    sequence = SequenceState(len(text), list(text), SamplingParams(), RequestOptions(cache_salt=salt))
    return drafter.propose([DraftRequest(sequence, count)])[0]


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_index_finds_what_a_search_of_the_text_finds(text: list[int]) -> None:
    index = NgramIndex()
    for end in range(1, len(text) + 1):  # token by token, as texts grow
        index.extend(text[:end])
    found = None
    for size in range(2, 6):
        places = [
            place
            for place in range(size, len(text))
            if text[place - size : place] == text[len(text) - size :]
        ]
        if size <= len(text) and places:
            found = places[-1], size
    assert index.find(text[-5:]) == found


def test_a_draft_is_what_followed_and_goes_on_with_its_period() -> None:
    assert propose(NgramDrafter(), [1, 2, 3, 4, 9, 1, 2]) == Draft([3, 4, 9, 1], kind=2)
    assert propose(NgramDrafter(), [5, 7, 8, 7, 8]).tokens == [7, 8, 7, 8]
    assert propose(NgramDrafter(max_tokens=3), [6, 6, 6, 6]).tokens == [6, 6, 6]
    assert not propose(NgramDrafter(), [1, 2, 3, 4, 5])


def test_answers_of_others_are_drafted_from_but_only_under_the_same_salt() -> None:
    drafter = NgramDrafter(store_tokens=100)
    ended = SequenceState(0, [1, 2], SamplingParams(), RequestOptions(cache_salt="a"))
    ended.tokens += [10, 11, 12, 13, 14]
    drafter.forget(ended)
    assert propose(drafter, [50, 10, 11, 12], salt="a").tokens == [13, 14]
    assert not propose(drafter, [50, 10, 11, 12], salt="b")
    assert not propose(NgramDrafter(), [50, 10, 11, 12], salt="a")


def test_the_store_forgets_the_oldest_answers() -> None:
    drafter = NgramDrafter(store_tokens=40)
    for start in range(100, 1000, 100):
        ended = SequenceState(start, [1], SamplingParams())
        ended.tokens += range(start, start + 10)
        drafter.forget(ended)
    assert propose(drafter, [900, 901, 902]).tokens == [903, 904, 905, 906]
    assert not propose(drafter, [100, 101, 102])


class NoisyEngine(FakeEngine):
    """A draft model that mostly agrees with the target."""

    def logits(self, prefix: np.ndarray) -> np.ndarray:
        row = super().logits(prefix)
        noise = np.random.default_rng(int(prefix[-1])).normal(0, 1, len(row))
        return np.asarray(row + noise, np.float32)


RISING = [(StepLoad(rows, rows * rows // 2, 1), 10.0 * rows) for rows in (1, 2, 4, 8)]


def draft_model(engine: FakeEngine, max_tokens: int = 5) -> DraftModel:
    return DraftModel(engine, StepTimes(FLAT), 320, max_tokens=max_tokens)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 6),
    num_blocks=st.integers(8, 30),
    draft_blocks=st.integers(1, 30),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 30),
    seed=st.integers(0, 99),
    sampled=st.booleans(),
)
def test_a_draft_model_changes_no_greedy_or_seeded_answer_however_small_its_pool(
    count: int, num_blocks: int, draft_blocks: int, seqs: int, spare: int, seed: int, sampled: bool
) -> None:
    config = SchedulerConfig(seqs, seqs + spare)
    params = ADJUSTING if sampled else GREEDY
    asked = [(prompt, replace(params, seed=number)) for number, prompt in enumerate(prompts(count, seed))]
    plain, _ = run(FakeEngine(num_blocks), asked, None, config)
    drafter = draft_model(NoisyEngine(draft_blocks, block_size=5))
    using = Speculator([drafter], StepTimes(FLAT), 320, num_tokens=4)
    drafted, _ = run(FakeEngine(num_blocks), asked, using, config)
    assert tokens(drafted) == tokens(plain)
    assert drafter._blocks.num_free == draft_blocks
    assert drafter._lanes == {}


def test_a_draft_model_like_the_target_is_always_right() -> None:
    """Its texts are computed once, its accepted drafts not again, and its rules are the request's."""
    for params in (GREEDY, replace(ADJUSTING, temperature=0, min_tokens=12)):
        engine, own = FakeEngine(), FakeEngine()
        using = Speculator([draft_model(own)], StepTimes(FLAT), 320, num_tokens=5)
        (outputs,), _ = run(engine, [([5, 6, 7], params)], using)
        assert outputs[-1].num_rejected_drafts == 0
        assert outputs[-1].num_accepted_drafts == 9
        assert engine.num_steps == 3
        assert own.num_tokens < 3 + 12


class Shapes(FakeEngine):
    """Keeps how many rows its steps had."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def run(self, step: Step) -> Floats:
        self.rows.append(len(step.token_ids))
        return super().run(step)


def test_a_draft_models_steps_have_two_rows_where_a_change_of_their_number_costs_more() -> None:
    asked = [([5, 6, 7], replace(GREEDY, max_tokens=24))]
    plain, _ = run(FakeEngine(), asked, None)
    for change_ms, rows in ((0.0, {1, 2}), (4.0, {2})):
        own = Shapes()
        drafter = DraftModel(own, StepTimes(FLAT if change_ms else RISING, change_ms), 320)
        drafted, _ = run(FakeEngine(), asked, Speculator([drafter], StepTimes(FLAT), 320, num_tokens=4))
        assert tokens(drafted) == tokens(plain)
        assert drafted[0][-1].num_rejected_drafts == 0
        assert set(own.rows[1:]) == rows  # the first takes in the prompt


def test_a_text_that_lags_behind_says_nothing_of_what_a_draft_takes() -> None:
    seconds = iter(range(1000))
    drafter = DraftModel(FakeEngine(), StepTimes(FLAT), 320, clock=lambda: float(next(seconds)))
    text = SequenceState(1, list(range(5, 25)), GREEDY, RequestOptions())
    before = drafter.expected_ms([DraftRequest(text, 2)])
    drafted = drafter.propose([DraftRequest(text, 2)])[0].tokens
    assert drafter.expected_ms([DraftRequest(text, 2)]) <= before
    text.tokens.append(drafted[0])
    drafter.propose([DraftRequest(text, 2)])
    assert drafter.expected_ms([DraftRequest(text, 2)]) > 2 * before


def test_what_it_took_to_take_in_a_text_is_charged_to_the_drafts_behind_it() -> None:
    """31 rows more than the two of a step, at a millisecond each, over 32 drafts."""
    drafter = DraftModel(FakeEngine(), StepTimes([(StepLoad(n, 0, 1), float(n)) for n in (1, 64)]), 320)
    known, new = (
        SequenceState(n, list(range(5, end)), GREEDY, RequestOptions()) for n, end in ((1, 7), (2, 39))
    )
    plain = drafter.expected_ms([DraftRequest(known, 1)])
    assert drafter.expected_ms([DraftRequest(new, 1)]) == pytest.approx(plain + 31 / 32)
    new.tokens.append(drafter.propose([DraftRequest(new, 1)])[0].tokens[0])
    assert drafter.expected_ms([DraftRequest(new, 1)]) == pytest.approx(plain + 31 / 32 * (1 - 1 / 32))


def test_a_draft_model_that_rested_is_expected_to_prepare_its_graph_anew() -> None:
    drafter = DraftModel(FakeEngine(), StepTimes(FLAT, change_ms=4.0), 320)
    text = SequenceState(1, list(range(5, 9)), GREEDY, RequestOptions())
    asked = [DraftRequest(text, 1)]
    text.tokens.append(drafter.propose(asked)[0].tokens[0])
    kept = drafter.expected_ms(asked)
    text.tokens += [9, 10, 11]
    assert drafter.expected_ms(asked) > kept + 1.5


def test_a_draft_model_follows_the_grammar_and_takes_it_back() -> None:
    options = RequestOptions(constraint=EvenThenEnd)
    (plain,), _ = run(FakeEngine(), [([5, 6], GREEDY)], None, options=options)
    using = Speculator([draft_model(FakeEngine())], StepTimes(FLAT), 320, num_tokens=5)
    (drafted,), _ = run(FakeEngine(), [([5, 6], GREEDY)], using, options=options)
    assert tokens([drafted]) == tokens([plain])
    assert drafted[-1].num_rejected_drafts == 0
    assert drafted[-1].num_accepted_drafts == 5  # of seven: the first is the prompt's, one is a bonus


def test_a_draft_model_with_another_vocabulary_is_refused(tiny: Path, tmp_path: Path) -> None:
    target = Tokenizer.load(tiny)
    other = tmp_path / "other"
    other.mkdir()
    text = (tiny / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|other|>"'))
    refuse_other_vocabulary(target, tiny, 320)
    with pytest.raises(UsageError, match=r"other: .* token 1 is '<\|other\|>' there and '<\|im_start\|>'"):
        refuse_other_vocabulary(target, other, 320)


@pytest.mark.parametrize("words", ["ngram", "draft", "auto"])
@pytest.mark.parametrize("num_tokens", [3, None])
def test_answers_of_a_real_model_are_the_same_with_every_drafter(
    words: str, num_tokens: int | None, tiny: Path, tmp_path: Path
) -> None:
    engine = open_engine(tiny, kv_cache_tokens=2048)
    draft = write_tiny(tmp_path / "draft", seed=1)
    config = SpeculationConfig(
        "ngram" if words == "ngram" else "draft",
        None if words == "ngram" else (tiny if words == "auto" else draft),
        num_tokens=num_tokens,
    )
    using = make_speculator(config, SchedulerConfig(), engine, Tokenizer.load(tiny), tiny)
    asked = [[7, 8, 9, 7, 8, 9, 7, 8], [40, 41], list(range(3, 60))]
    params = SamplingParams(max_tokens=20, temperature=0)
    plain = serve_all(engine, None, asked, params, 3)
    drafted = serve_all(engine, using, asked, params, 3)
    assert drafted.answers == plain.answers
    if words == "auto" and num_tokens:  # the target as its own draft model
        assert min(drafted.rates()) > 0.9
        assert drafted.num_steps < plain.num_steps / 2


def test_words_of_the_options_are_read_or_refused() -> None:
    assert parse_kind("draft=some/where") == ("draft", Path("some/where"))
    assert parse_kind("auto") == ("auto", None)
    assert (parse_count("tokens", "auto"), parse_count("tokens", "4")) == (None, 4)
    for words in ("draft", "draft=", "ngram=x", "eagle", ""):
        with pytest.raises(UsageError, match="wanted off, ngram"):
            parse_kind(words)
    for words in ("0", "-1", "many", ""):
        with pytest.raises(UsageError, match="1 or more, or auto"):
            parse_count("tokens", words)
    with pytest.raises(UsageError, match="draft and path None"):
        SpeculationConfig("draft")


def test_what_a_change_of_rows_costs_is_measured() -> None:
    class Preparing(Shapes):
        def run(self, step: Step) -> Floats:
            if self.rows and self.rows[-1] != len(step.token_ids):
                time.sleep(0.02)
            return super().run(step)

    assert 10 < measure_change_ms(Preparing()) < 40
    assert measure_change_ms(FakeEngine()) < 5


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("speculative_tokens", lambda: SpeculationConfig("off", num_tokens=4)),
        ("speculative_tree", lambda: SpeculationConfig("ngram", tree_width=3)),
        ("block_verification", lambda: SpeculationConfig("ngram", block_verification=True)),
        ("speculative_store", lambda: SpeculationConfig("heads", Path("heads"), store_tokens=9)),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    option: str, config: Callable[[], SpeculationConfig]
) -> None:
    with pytest.raises(UsageError, match=f"{option}: changes nothing with speculative"):
        config()
