"""Recipes that share out a budget of bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qtool.calibrate.layers import LayerRunner
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe, override
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme, WeightScheme
from qtool.errors import UsageError
from qtool.quantize.auto import bytes_of, stored_bytes
from qtool.quantize.fused import fused_with
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.recipes import find_recipe
from tests.quantize.test_pipeline import TEXT, contents

CANDIDATES = [{"num_bits": bits, "group_size": 32} for bits in (3, 4, 8)]


def recipe_of(folder: Path, budget: Mapping[str, float], **others: Any) -> Recipe:
    """All linears but the head, in 3, 4 or 8 bits in groups of 32, with scales in float32: 4, 5 or 9 bits."""
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    auto = {"targets": ["*"], "budget": budget, "candidates": CANDIDATES, "seq_len": 24} | others
    return Recipe.model_validate(
        {
            "calibration": {"dataset": str(text), "num_samples": 5, "seq_len": 24},
            "quantization": {"auto": auto, "keep": ["lm_head"]},
        }
    )


def stored_size(checkpoint: Path) -> int:
    """The bytes of the quantized weights."""
    source = Checkpoint(checkpoint)
    parts = (".weight_packed", ".weight_scale", ".weight_zero_point")
    return sum(source.num_bytes(name) for name in source if name.endswith(parts))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_budget_of_bits_is_kept_and_nearly_used_up(tiny: Path, tmp_path: Path, method: str) -> None:
    manifest = quantize_checkpoint(
        tiny, recipe_of(tmp_path, {"average_bits": 5.5}, method=method), tmp_path / "out"
    )
    allocation, runner = manifest.allocation, LayerRunner(Checkpoint(tiny))
    assert allocation is not None
    count = sum(linear.weight.numel() for name, linear in runner.linears().items() if name != "lm_head")
    assert stored_size(tmp_path / "out") == allocation.chosen.bytes
    assert 5.3 < 8 * stored_size(tmp_path / "out") / count <= 5.5
    assert allocation.chosen.average_bits == pytest.approx(8 * allocation.chosen.bytes / count)
    assert {record.method for record in manifest.linears.values()} == {method}
    assert len({record.num_bits for record in manifest.linears.values()}) > 1
    kls, sizes = ([getattr(point, name) for point in allocation.frontier] for name in ("kl", "bytes"))
    assert kls == sorted(kls, reverse=True)
    assert sizes == sorted(sizes)
    for module, record in manifest.linears.items():
        fused = fused_with(module, manifest.linears)
        assert {manifest.linears[one].scheme for one in fused} == {record.scheme}
        assert record.num_bits == (3, 4, 8)[allocation.candidates[module]]


def test_a_linear_that_rounding_breaks_gets_the_most_bits(tiny_copy: Path, tmp_path: Path) -> None:
    recipe, bits = recipe_of(tmp_path, {"average_bits": 5.6}, targets=["*.mlp.*"]), {}
    for name, factor in (("whole", 1), ("broken", 20)):
        tensors = load_file(tiny_copy / "model.safetensors")
        loud = slice(None, None, 32)
        tensors["model.layers.2.mlp.down_proj.weight"][:, loud] *= factor
        tensors["model.layers.2.mlp.up_proj.weight"][loud] /= factor
        save_file(tensors, tiny_copy / "model.safetensors", {"format": "pt"})
        linears = quantize_checkpoint(tiny_copy, recipe, tmp_path / name).linears
        bits[name] = linears["model.layers.2.mlp.down_proj"].num_bits
    assert bits["whole"] < bits["broken"] == 8


def test_other_budgets_are_kept_too(tiny: Path, tmp_path: Path) -> None:
    found = quantize_checkpoint(tiny, recipe_of(tmp_path, {"max_kl": 0.2}), tmp_path / "kl").allocation
    assert found is not None
    assert 0.1 < found.chosen.kl <= 0.2
    size = {"bytes": found.chosen.bytes}
    again = quantize_checkpoint(tiny, recipe_of(tmp_path, size), tmp_path / "size").allocation
    assert again is not None
    assert again.chosen == found.chosen  # the same point of the curve, from both sides
    endless = quantize_checkpoint(tiny, recipe_of(tmp_path, {"bytes": 10**30}), tmp_path / "all").allocation
    assert endless is not None
    assert endless.chosen == found.frontier[-1]


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        (
            {"average_bits": 3},
            r"average_bits 3\.0 is less than the 4\.000 that the smallest candidates take",
        ),
        ({"bytes": 1000}, r"bytes 1000 are fewer than the \d+ that the smallest"),
        ({"max_kl": 1e-6}, r"max_kl 1e-06 is less than the 0\.0\d+ that the best candidates"),
    ],
)
def test_a_budget_that_no_choice_keeps_is_refused(
    tiny: Path, tmp_path: Path, budget: dict[str, float], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        quantize_checkpoint(tiny, recipe_of(tmp_path, budget), tmp_path / "out")
    assert (tmp_path / "out.partial").exists() == ("max_kl" in budget)  # which is known after some work
    quantize_checkpoint(tiny, recipe_of(tmp_path, {"average_bits": 16}), tmp_path / "out")


def test_candidates_have_to_fit_and_rules_go_before(tiny: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"average_bits": 5.5}, candidates=[{"group_size": 64}, "fp8"])
    with pytest.raises(UsageError, match=r"group_size 64 does not divide in_features 96 of .*q_proj; use 32"):
        quantize_checkpoint(tiny, recipe, tmp_path / "out")
    rule = {"targets": ["*.self_attn.*"], "weights": "fp8"}
    recipe = recipe_of(tmp_path, {"average_bits": 5})
    ruled = override(recipe, quantization=override(recipe.quantization, rules=(rule,)))
    manifest = quantize_checkpoint(tiny, ruled, tmp_path / "out")
    assert manifest.allocation is not None
    assert not any("self_attn" in module for module in manifest.allocation.candidates)
    assert len(manifest.linears) == 3 * 7
    everything = override(recipe.quantization, rules=({**rule, "targets": ["*"]},))
    with pytest.raises(UsageError, match="rules match all of its targets"):
        quantize_checkpoint(tiny, override(recipe, quantization=everything), tmp_path / "none")


@pytest.mark.parametrize("stop_at", [(3, 3), (0, 3), (2, 3)], ids=["before", "after", "later"])
def test_a_run_that_stops_resumes_and_ends_with_the_same_bytes(
    tiny: Path, tmp_path: Path, stop_at: tuple[int, int]
) -> None:
    """Before the allocation is kept, after it, and among the layers; both passes tell of layers."""
    recipe, told = recipe_of(tmp_path, {"average_bits": 5.5}), []

    def stop(done: int, total: int, sqnr_db: float | None) -> None:
        told.append(done)
        if (done, total) == stop_at and (stop_at != (2, 3) or 0 in told):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, recipe, tmp_path / "stopped", progress=stop)
    allocation = tmp_path / "stopped.partial" / "allocation.json"
    assert allocation.exists() == (stop_at != (3, 3))
    quantize_checkpoint(tiny, recipe, tmp_path / "stopped")
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    ("scheme", "scales"),
    [
        (IntScheme(3, 32, True), 37 * 3 * 2),
        (IntScheme(4, None, False), 37 * 2 + 5 * 4),  # zero points are packed, 8 in a word
        (Fp8Scheme(1, None), 37 * 2),
        (Fp4Scheme("nvfp4"), 37 * 6 + 4),
        (Fp4Scheme("mxfp4"), 37 * 3),
    ],
    ids=str,
)
def test_sizes_count_codes_scales_and_zero_points(scheme: WeightScheme, scales: int) -> None:
    codes = 37 * 96 * scheme.num_bits // 8
    assert stored_bytes(scheme, 37, 96, torch.float16) == codes + scales


def test_the_shipped_recipe_shares_out_attention_and_head_too(tiny: Path, tmp_path: Path) -> None:
    recipe = find_recipe("auto")
    recipe = override(recipe, calibration=override(recipe.calibration, num_samples=4, seq_len=32))
    manifest = quantize_checkpoint(tiny, recipe, tmp_path / "out")
    assert manifest.allocation is not None
    assert manifest.allocation.chosen.average_bits <= 4.5
    assert len(manifest.linears) == 3 * 7 + 1
    written = Checkpoint(tmp_path / "out")
    assert written.format is not None
    assert {module: str(written.format.scheme(module)) for module in manifest.linears} == {
        module: record.scheme for module, record in manifest.linears.items()
    }


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_the_bits_that_a_manifest_has_allow_the_bytes_that_it_has(size: int, count: int) -> None:
    assert bytes_of(8 * size / count, count) == size
