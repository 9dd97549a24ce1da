"""Every recipe that ships does what it says."""

from pathlib import Path

import pytest

from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe, override
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.quantize.plan import assign
from qtool.recipes import find_recipe, shipped

LEAST_DB = {4: 12.0, 8: 30.0}
"""A little below what rounding random weights costs (4 bits in groups of 32: 19 dB; fp8: 31 dB)."""

ROUNDING = ("rtn4", "fp8")
"""Those that round to nearest and look at no text."""


def on_a_small_text(name: str) -> Recipe:
    recipe = find_recipe(name)
    return override(recipe, calibration=override(recipe.calibration, num_samples=4, seq_len=32))


@pytest.mark.parametrize("name", [name for name in shipped() if name != "auto"])
def test_a_shipped_recipe_quantizes_what_it_says_and_nothing_else(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    recipe, output = on_a_small_text(name), tmp_path / "out"
    manifest = quantize_checkpoint(tiny, recipe, output)
    written = Checkpoint(output)
    assert written.format is not None
    assert len(manifest.linears) == (9 if recipe.quantization.rules else 0)
    for module, record in manifest.linears.items():
        assert ".mlp." in module
        assert record.scheme == str(written.format.scheme(module))
        assert record.sqnr_db > LEAST_DB[record.num_bits]
        # SmoothQuant makes weights harder to round, for the sake of activations, which this does not count.
        assert record.sqnr_db > record.sqnr_rtn_db - 1.0
        assert (record.tokens, record.dead_inputs) == (0 if name in ROUNDING else 4 * 32, 0)
    kept = set(Checkpoint(tiny)) - {f"{module}.weight" for module in manifest.linears}
    assert kept <= set(written)


@pytest.mark.parametrize("name", [name for name in shipped() if name not in ("auto", "kv8")])
def test_a_shipped_recipe_means_the_experts_of_a_mixture_too(name: str) -> None:
    prefix = "model.layers.0"
    linears = {
        f"{prefix}.self_attn.q_proj": 128,
        f"{prefix}.block_sparse_moe.experts.3.w2": 256,
        "lm_head": 128,
    }
    assert list(assign(find_recipe(name).quantization, linears)) == [
        f"{prefix}.block_sparse_moe.experts.3.w2"
    ]


def test_kv8_writes_a_scale_for_the_keys_and_values_of_each_layer(tiny: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny, on_a_small_text("kv8"), tmp_path / "out")
    written = Checkpoint(tmp_path / "out")
    assert written.format is not None
    assert written.format.kv_cache is not None
    for layer in range(3):
        scales = written.format.kv_cache.read(written, f"model.layers.{layer}.self_attn")
        assert scales.key.shape == scales.value.shape == (1,)
        assert 0 < float(scales.key) < 1
