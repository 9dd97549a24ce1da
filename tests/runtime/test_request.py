"""Sampling parameters are checked when they are made."""

from typing import Any

import pytest

from qtool.runtime.request import ParameterError, SamplingParams, SequenceState


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("stop", ("a", "")),
        ("n", 0),
        ("n", 129),
        ("min_p", -0.01),
        ("min_p", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: float("nan")}),
        ("min_tokens", 17),
        ("bad_words", ((1,), ())),
        ("allowed_token_ids", frozenset()),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ("a", "b", "c", "d", "e")),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={320: 1.0}),
        SamplingParams(stop_token_ids=frozenset({3, -1})),
        SamplingParams(allowed_token_ids=frozenset({320})),
        SamplingParams(bad_words=((1, 2), (1, 320))),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused_by_the_name_of_its_field(
    params: SamplingParams,
) -> None:
    with pytest.raises(ParameterError, match=r"token id -?\d+ is not in 0 … 319"):
        params.refuse_tokens_outside(320)


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**63), 2**64 - 1])
def test_every_64_bit_seed_makes_its_own_generator(seed: int) -> None:
    first, again = SamplingParams(seed=seed).generator(), SamplingParams(seed=seed).generator()
    assert first.random(4).tolist() == again.random(4).tolist()
    assert SamplingParams(seed=7).generator().random() != SamplingParams(seed=seed).generator().random()


def test_without_a_seed_two_generators_differ() -> None:
    assert SamplingParams().generator().random() != SamplingParams().generator().random()


def test_a_sequence_ends_at_a_stop_token_or_its_length_and_the_stop_token_wins() -> None:
    sequence = SequenceState(0, [5, 2], SamplingParams(max_tokens=2, stop_token_ids=frozenset({2})))
    sequence.tokens.append(9)
    assert sequence.finish_reason() is None
    sequence.tokens.append(9)
    assert sequence.finish_reason() == "length"
    sequence.tokens[-1] = 2
    assert sequence.finish_reason() == "stop"
