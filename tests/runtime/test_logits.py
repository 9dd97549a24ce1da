"""What parameters and constraints do to logits, and what is reported of them."""

from collections.abc import Sequence

import numpy as np
import pytest

from qtool.runtime.constraint import Bitmask, allowed_tokens, bitmask_width
from qtool.runtime.failures import NoTokenLeftError
from qtool.runtime.logits import adjusted
from qtool.runtime.logprobs import token_logprobs
from qtool.runtime.next_token import next_token
from qtool.runtime.request import RequestOptions, SamplingParams, SequenceState

VOCAB = 37


def row(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def state(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2),
    generated: Sequence[int] = (),
    options: RequestOptions = RequestOptions(),  # noqa: B008 (frozen)
) -> SequenceState:
    sequence = SequenceState(0, list(prompt), params, options)
    sequence.tokens += generated
    return sequence


def forbidden(params: SamplingParams, generated: Sequence[int] = ()) -> set[int]:
    return set(np.flatnonzero(np.isinf(adjusted(row(), state(params, generated=generated)))).tolist())


class Only:
    """A constraint that allows one token after the other, then ends."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.left = list(tokens)

    @property
    def finished(self) -> bool:
        return not self.left

    def fill_mask(self, mask: Bitmask) -> None:
        mask.fill(0)
        mask[self.left[0] // 32] |= np.int32(1) << np.int32(self.left[0] % 32)

    def accept(self, token: int) -> None:
        assert token == self.left.pop(0)

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("nothing is drafted here")


def test_parameters_that_ask_for_nothing_leave_the_very_array() -> None:
    logits = row()
    assert adjusted(logits, state(SamplingParams(temperature=0.3, top_p=0.5), generated=[4, 4])) is logits


def test_penalties_follow_their_formulas_and_the_models_logits_stay() -> None:
    logits = row()
    before = logits.copy()
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    found = adjusted(logits, state(params, prompt=[7, 7, 9], generated=[4, 4, 9]))
    assert (logits == before).all()
    wanted = before.copy()
    for token in (7, 9, 4):
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    wanted[4] -= 0.5 + 2 * 0.25
    wanted[9] -= 0.5 + 0.25
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_bias_can_force_and_ban_tokens() -> None:
    params = SamplingParams(temperature=0, logit_bias={5: 100.0, 6: -100.0})
    found = adjusted(row(), state(params))
    np.testing.assert_allclose(found[[5, 6]] - row()[[5, 6]], [100, -100], rtol=1e-5)
    assert next_token(row(), state(params)).token == 5


def test_stop_tokens_are_forbidden_until_min_tokens_are_there() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({3, 8}))
    assert [forbidden(params, generated) for generated in ([], [1], [1, 2])] == [{3, 8}, {3, 8}, set()]


def test_bad_words_are_forbidden_where_they_would_be_complete() -> None:
    params = SamplingParams(bad_words=((5,), (1, 2, 6), (2, 7)))
    assert forbidden(params) == {5}
    assert forbidden(params, [2]) == {5, 7}
    assert forbidden(params, [1, 2]) == {5, 6, 7}
    assert forbidden(params, [1, 2, 3]) == {5}


def test_nothing_but_allowed_tokens_is_left() -> None:
    assert forbidden(SamplingParams(allowed_token_ids=frozenset({2, 36}))) == set(range(VOCAB)) - {2, 36}


def test_a_constraint_is_filled_accepts_and_ends_the_sequence() -> None:
    sequence = state(SamplingParams(), options=RequestOptions(constraint=lambda: Only([35, 3])))
    for token in (35, 3):
        assert sequence.finish_reason() is None
        assert next_token(row(), sequence).token == token
        sequence.tokens.append(token)
    assert sequence.finish_reason() == "stop"


@pytest.mark.parametrize("method", ["fill_mask", "accept"])
def test_a_grammar_that_fails_ends_its_own_sequence_and_no_other(method: str) -> None:
    class Failing(Only):
        pass

    def fail(self: Only, argument: object) -> None:
        raise ValueError("the grammar is lost")

    setattr(Failing, method, fail)
    bad = state(SamplingParams(), options=RequestOptions(constraint=lambda: Failing([35])))
    failed, fine = next_token(row(), bad), next_token(row(), state(SamplingParams(temperature=0)))
    assert (failed.token, str(failed.error)) == (
        None,
        "the request's grammar failed: ValueError: the grammar is lost",
    )
    assert fine.token == int(row().argmax())


@pytest.mark.parametrize("token", [0, 31, 32, 36])
def test_bits_of_a_mask_are_tokens_least_significant_first(token: int) -> None:
    mask = np.full(bitmask_width(VOCAB), -1, np.int32)
    assert allowed_tokens(mask, VOCAB).tolist() == [True] * VOCAB
    Only([token]).fill_mask(mask)
    assert np.flatnonzero(allowed_tokens(mask, VOCAB)).tolist() == [token]


def test_forbidding_every_token_and_logits_that_are_not_finite_are_told_apart() -> None:
    params = SamplingParams(allowed_token_ids=frozenset({3}), bad_words=((3,),))
    nothing, broken = next_token(row(), state(params)), next_token(row() * np.nan, state(params))
    assert isinstance(nothing.error, NoTokenLeftError)
    assert "after 0 tokens none is left" in str(nothing.error)
    assert "rules (bad_words, allowed_token_ids) together forbid every one" in str(nothing.error)
    assert not isinstance(broken.error, NoTokenLeftError)
    assert "not finite" in str(broken.error)


def test_logprobs_are_the_log_softmax_of_the_models_own_logits() -> None:
    logits = row()
    wanted = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={5: 100.0})
    report = next_token(logits, state(params)).logprobs
    assert report is not None
    assert report.token == 5
    best = np.argsort(-wanted)[:3]
    assert [token for token, _ in report.top] == best.tolist()
    # float32: log of a sum of 37 terms is right to some 1e-6.
    np.testing.assert_allclose(
        [report.logprob, *(value for _, value in report.top)], wanted[[5, *best]], atol=1e-5
    )


def test_equal_tokens_are_reported_by_id_and_no_more_than_there_are() -> None:
    flat = np.zeros(4, np.float32)
    assert [token for token, _ in token_logprobs(flat, 2, 3).top] == [0, 1, 2]
    assert len(token_logprobs(flat, 2, 20).top) == 4
    assert token_logprobs(flat, 2, 0).top == ()
    assert token_logprobs(flat, 2, 0).logprob == pytest.approx(np.log(0.25))
