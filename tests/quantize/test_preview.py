"""What a recipe would make of a model, held to what it makes."""

from pathlib import Path
from typing import Any

import pytest

from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe, override
from qtool.errors import UsageError
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.quantize.preview import preview

BESIDE = (".weight_shape", ".input_scale", ".k_scale", ".v_scale")
"""Suffixes of some bytes a linear or a layer, which are no codes, scales of weights or zero points."""
KEEP = ["lm_head", "*.embed_tokens"]
RULES: dict[str, dict[str, Any]] = {
    "int4, groups": {"weights": {"group_size": 32}},
    "int3, zero points, channel": {"weights": {"num_bits": 3, "group_size": None, "symmetric": False}},
    "int8, static inputs": {
        "weights": {"num_bits": 8, "group_size": None},
        "activations": {"format": "int8", "dynamic": False},
    },
    "fp8": {"weights": "fp8", "activations": "fp8"},
    "nvfp4": {"weights": "nvfp4"},
    "mxfp4": {"weights": "mxfp4"},
}


def recipe_of(tmp_path: Path, **quantization: Any) -> Recipe:
    text = tmp_path / "text.txt"
    text.write_text("What is it that a recipe would make of a model? " * 20, encoding="utf-8")
    calibration = {"dataset": str(text), "num_samples": 2, "seq_len": 24}
    return Recipe.model_validate({"calibration": calibration, "quantization": quantization})


def size_of(checkpoint: Path) -> int:
    source = Checkpoint(checkpoint)
    return sum(source.num_bytes(name) for name in source if not name.endswith(BESIDE))


@pytest.mark.parametrize("keep", [["*.self_attn.*", *KEEP], ["*.embed_tokens"]], ids=["mlp", "head too"])
@pytest.mark.parametrize("kind", RULES)
def test_the_size_foretold_is_that_of_the_checkpoint(
    kind: str, keep: list[str], tiny: Path, tmp_path: Path
) -> None:
    rule = {"targets": ["*"], "method": "rtn", **RULES[kind]}
    recipe = recipe_of(tmp_path, rules=[rule], keep=keep)
    found = preview(tiny, recipe)
    quantize_checkpoint(tiny, recipe, tmp_path / "out")
    assert found.before == size_of(tiny)
    assert (found.least, found.most) == (size_of(tmp_path / "out"),) * 2
    assert found.calibrates == ("static" in kind)
    assert found.untied_head == ("lm_head" not in keep)


def test_linears_that_become_alike_are_told_together(tiny: Path, tmp_path: Path) -> None:
    rules = [
        {"targets": ["*.down_proj"], "weights": {"num_bits": 8, "group_size": 32}, "method": "gptq"},
        {"targets": ["*.mlp.*"], "weights": {"group_size": 32}, "method": "awq"},
    ]
    found = preview(tiny, recipe_of(tmp_path, rules=rules, kv_cache="fp8"))
    told = {(part.becomes, part.method): len(part.linears) for part in found.parts}
    assert told == {
        ("full precision", ""): 3 * 4 + 1,
        ("int8 symmetric, group 32", "gptq"): 3,
        ("int4 symmetric, group 32", "awq"): 2 * 3,
    }
    assert found.parts[1].linears[0] == "model.layers.0.mlp.gate_proj"
    assert (found.kv_cache, found.calibrates) == ("fp8 KV cache, a scale a layer", True)


def test_a_budget_lies_between_what_is_foretold(tiny: Path, tmp_path: Path) -> None:
    candidates = [{"num_bits": bits, "group_size": 32} for bits in (3, 4, 8)]
    auto = {"targets": ["*"], "budget": {"average_bits": 5.5}, "candidates": candidates, "seq_len": 24}
    recipe = recipe_of(tmp_path, auto=auto, keep=KEEP)
    found = preview(tiny, recipe)
    quantize_checkpoint(tiny, recipe, tmp_path / "out")
    assert found.least < size_of(tmp_path / "out") < found.most
    (part,) = [part for part in found.parts if part.method]
    assert part.becomes == " or ".join(f"int{bits} symmetric, group 32" for bits in (3, 4, 8))


def test_what_does_not_fit_the_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    rule = {"targets": ["*.mlp.*"], "weights": {"group_size": 128}, "method": "rtn"}
    with pytest.raises(UsageError, match="does not divide in_features 96"):
        preview(tiny, recipe_of(tmp_path, rules=[rule]))
    fitting = recipe_of(tmp_path, rules=[rule | {"weights": {"group_size": 32}}])
    for calibration, problem in (
        ({"seq_len": 1000}, "beyond the model's 256 positions"),
        ({"num_samples": 1000}, "wanted 1000; use fewer or shorter windows"),
        ({"dataset": str(tmp_path / "lost.txt")}, "lost.txt: cannot be read"),
    ):
        asked = override(fitting, calibration=override(fitting.calibration, **calibration))
        with pytest.raises(UsageError, match=problem):
            preview(tiny, asked)
    auto = {"targets": ["*"], "budget": {"bytes": 1000}, "candidates": [{"group_size": 32}, "fp8"]}
    with pytest.raises(UsageError, match="bytes 1000 are fewer than"):
        preview(tiny, recipe_of(tmp_path, auto=auto, keep=KEEP))
