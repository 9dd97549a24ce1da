"""Number formats in recipes."""

from pathlib import Path

import pytest

from qtool.core.recipe import Recipe
from qtool.core.schemes import (
    ActivationScheme,
    Fp4Scheme,
    Fp8Scheme,
    IntScheme,
    KvCacheScheme,
    WeightScheme,
)
from tests.core.test_recipe import _load as load
from tests.core.test_recipe import _problems as problems


def recipe(rest: str, targets: str = '["*.mlp.*"]') -> str:
    return f"quantization:\n  rules:\n    - targets: {targets}\n      {rest}\n"


@pytest.mark.parametrize(
    ("weights", "scheme"),
    [
        ("{num_bits: 3, group_size: 64, symmetric: false}", IntScheme(3, 64, False)),
        ("{format: int, num_bits: 8, group_size: null}", IntScheme(8, None, True)),
        ("int", IntScheme(4, 128, True)),
        ("fp8", Fp8Scheme(1, None)),
        ("{format: fp8, granularity: block}", Fp8Scheme(128, 128)),
        ("{format: fp8, granularity: tensor}", Fp8Scheme(None, None)),
        ("mxfp4", Fp4Scheme("mxfp4")),
        ("{format: nvfp4}", Fp4Scheme("nvfp4")),
    ],
)
def test_every_format_of_weights_can_be_asked_for(weights: str, scheme: WeightScheme, tmp_path: Path) -> None:
    loaded = load(tmp_path, recipe(f"weights: {weights}"))
    assert loaded.quantization.rules[0].weights.scheme(1536) == scheme
    assert Recipe.model_validate_json(loaded.model_dump_json()) == loaded


@pytest.mark.parametrize(
    ("activations", "scheme"),
    [
        ("int8", ActivationScheme("int8", dynamic=True)),
        ("{format: int8, symmetric: false}", ActivationScheme("int8", True, symmetric=False)),
        ("{format: fp8, dynamic: false}", ActivationScheme("fp8", dynamic=False)),
        ("{format: fp8, group_size: 128}", ActivationScheme("fp8", True, group_size=128)),
    ],
)  # fmt: skip
def test_every_format_of_activations_can_be_asked_for(
    activations: str, scheme: ActivationScheme, tmp_path: Path
) -> None:
    asked = load(tmp_path, recipe(f"activations: {activations}")).quantization.rules[0].activations
    assert asked is not None
    assert asked.scheme == scheme


def test_a_kv_cache_may_be_all_that_is_quantized(tmp_path: Path) -> None:
    asked = load(tmp_path, "quantization: {kv_cache: fp8}").quantization
    assert asked.rules == ()
    assert asked.kv_cache is not None
    assert asked.kv_cache.scheme == KvCacheScheme("fp8")
    asked = load(tmp_path, "quantization: {kv_cache: {format: int8, granularity: head}}").quantization
    assert asked.kv_cache is not None
    assert asked.kv_cache.scheme == KvCacheScheme("int8", per_head=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (recipe("weights: fp9"), "weights: 'fp9' is not known; did you mean 'fp8'?"),
        (recipe("weights: {format: fp8, group_size: 64}"), "weights.group_size: unknown key"),
        (recipe("weights: {format: nvfp4, group: 16}"), "weights.group: unknown key; known: format"),
        (recipe("weights: {num_bits: 5}"), "weights.num_bits: should be 3, 4 or 8 (got 5)"),
        (recipe("activations: int4"), "activations.format: should be 'int8' or 'fp8' (got 'int4')"),
        (recipe("activations: {format: fp8, symmetric: false}"), "activations: fp8 has no zero points; drop"),
        (
            recipe("activations: {format: int8, dynamic: false, group_size: 64}"),
            "activations: group_size is for dynamic activations",
        ),
        ("quantization: {kv_cache: {format: fp8, granularity: layer}}", "kv_cache.granularity: should be"),
        ("quantization: {keep: []}", "quantization: has neither rules, auto nor kv_cache, so"),
    ],
)  # fmt: skip
def test_formats_that_cannot_be_are_named_with_what_can(text: str, message: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, text)
    assert message in problem
