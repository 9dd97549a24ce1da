import pytest
from pydantic import ValidationError

from qtool.core.recipe import Awq, Gptq, Quantization, Rtn
from qtool.core.schemes import ActivationScheme, Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme
from qtool.errors import UsageError
from qtool.quantize.plan import assign

LINEARS = {
    "model.layers.0.self_attn.q_proj": 576,
    "model.layers.0.mlp.up_proj": 576,
    "model.layers.0.mlp.down_proj": 1536,
    "lm_head": 576,
}


def quantization(*rules: dict[str, object], keep: tuple[str, ...] | None = None) -> Quantization:
    return Quantization.model_validate({"rules": rules} | ({} if keep is None else {"keep": keep}))


def test_the_first_rule_that_matches_wins_and_keep_wins_over_all() -> None:
    rules = (
        {"targets": ["*.down_proj"], "weights": {"group_size": None}, "method": {"name": "gptq"}},
        {"targets": ["*"], "weights": {"group_size": 64, "symmetric": False}, "method": {"name": "awq"}},
    )
    assigned = assign(quantization(*rules), LINEARS)
    assert list(assigned) == ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert assigned["model.layers.0.mlp.up_proj"].scheme == IntScheme(4, 64, symmetric=False)
    assert assigned["model.layers.0.mlp.up_proj"].method == Awq()
    assert assigned["model.layers.0.mlp.down_proj"].scheme == IntScheme(4, None, symmetric=True)
    assert assigned["model.layers.0.mlp.down_proj"].method == Gptq()
    assert set(assign(quantization(*rules, keep=()), LINEARS)) == set(LINEARS)


def test_the_group_size_falls_back_where_it_does_not_divide() -> None:
    weights = {"group_size": 128, "group_size_fallback": [64, 32]}
    assigned = assign(quantization({"targets": ["*.mlp.*"], "weights": weights}), LINEARS)
    assert [one.scheme.group_size for one in assigned.values()] == [64, 128]
    assert {one.method for one in assigned.values()} == {Rtn()}


def test_a_group_size_that_divides_nothing_names_the_linear_and_sizes_that_do() -> None:
    weights = {"group_size": 100, "group_size_fallback": [50]}
    with pytest.raises(UsageError) as error:
        assign(quantization({"targets": ["*.up_proj"], "weights": weights}), LINEARS)
    assert "group_size 100, 50 does not divide in_features 576 of model.layers.0.mlp.up_proj" in str(
        error.value
    )
    assert "use 32, 48, 64, 96, 192" in str(error.value)


def test_a_target_that_matches_nothing_is_named_with_the_nearest_linear() -> None:
    with pytest.raises(UsageError, match=r"'model\.layers\.\*\.mlp\.upproj' matches no linear") as error:
        assign(quantization({"targets": ["model.layers.*.mlp.upproj"]}), LINEARS)
    assert "did you mean 'model.layers.*.mlp.up_proj'?" in str(error.value)


def test_a_target_that_keep_takes_back_entirely_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"matches only linears that quantization\.keep holds"):
        assign(quantization({"targets": ["*.q_proj"]}), LINEARS)


def test_an_unknown_method_is_refused_by_the_recipe() -> None:
    with pytest.raises(ValidationError, match="awk"):
        quantization({"targets": ["*"], "method": {"name": "awk"}})


def test_a_block_that_a_format_prescribes_has_to_divide_the_inputs() -> None:
    weights = {"targets": ["*"], "weights": "mxfp4"}
    assert assign(quantization(weights), {"a": 96})["a"].scheme == Fp4Scheme("mxfp4")
    with pytest.raises(UsageError) as error:
        assign(quantization(weights), {"a": 80})
    assert "group_size 32, which mxfp4 prescribes, does not divide in_features 80 of a" in str(error.value)
    assert "use format int with 80" in str(error.value)


def test_groups_of_inputs_have_to_divide_them() -> None:
    rule = {"targets": ["*"], "weights": "fp8", "activations": {"format": "fp8", "group_size": 128}}
    assert assign(quantization(rule), {"a": 256})["a"].computes_with == LinearScheme(
        Fp8Scheme(1, None), ActivationScheme("fp8", dynamic=True, group_size=128)
    )
    with pytest.raises(UsageError, match=r"activations\.group_size 128 does not divide in_features 576 of b"):
        assign(quantization(rule), {"a": 256, "b": 576})
