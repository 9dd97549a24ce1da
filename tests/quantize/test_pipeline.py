import fcntl
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.calibrate.text import load_records
from qtool.calibrate.windows import calibration_windows, load_tokenizer
from qtool.core.checkpoint import Checkpoint
from qtool.core.manifest import MANIFEST, Manifest
from qtool.core.recipe import Calibration, Recipe, override
from qtool.errors import QtoolError, UsageError
from qtool.quantize import stream
from qtool.quantize.pipeline import quantize_checkpoint

TEXT = "A short text to calibrate on: 3.14159, naïve, def f(x): return x * 2.\n" * 30


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def recipe_of(
    text: Path,
    method: str = "awq",
    targets: str = "*.mlp.*",
    keep: Sequence[str] = ("lm_head",),
    **weights: object,
) -> Recipe:
    """Groups of 32, which divide both 96 and 160; five windows of 24 tokens."""
    if "format" not in weights:
        weights = {"group_size": 32, "symmetric": False} | weights
    rule = {"targets": [targets], "weights": weights, "method": {"name": method}}
    calibration = {"dataset": str(text), "num_samples": 5, "seq_len": 24}
    return Recipe.model_validate(
        {"calibration": calibration, "quantization": {"rules": [rule], "keep": list(keep)}}
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, but for what the manifest says of time and memory."""
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    manifest = json.loads(files.pop(MANIFEST))
    del manifest["seconds"], manifest["peak_memory_bytes"]
    return files | {MANIFEST: json.dumps(manifest).encode()}


def dense_twin(checkpoint: Path, quantized: Path) -> torch.nn.Module:
    """The original model, every weight replaced by what the quantized checkpoint says it is."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    source = Checkpoint(quantized)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            stored = source.tensor(name) if name in source else source.linear(module).dense()
            parameter.copy_(stored)
    return model


def windows_of(checkpoint: Path, text: Path, calibration: Calibration) -> Tensor:
    return calibration_windows(load_tokenizer(checkpoint), load_records(str(text)), calibration)


def tokens() -> Tensor:
    return torch.randint(3, 320, (2, 31), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq", "awq+gptq", "smoothquant", "best"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@torch.no_grad()
def test_transformers_loads_it_and_gives_the_logits_of_our_numbers(
    tiny: Path, text: Path, tmp_path: Path, method: str, symmetric: bool
) -> None:
    output = tmp_path / "out"
    quantize_checkpoint(tiny, recipe_of(text, method, symmetric=symmetric), output)
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    expected = dense_twin(tiny, output)(tokens()).logits
    # The same float32 sums over weights that were unpacked by another library.
    assert torch.allclose(loaded(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_the_error_of_a_linear_that_absorbs_scales_is_against_what_it_became(
    tiny: Path, text: Path, tmp_path: Path, method: str
) -> None:
    loud = tmp_path / "loud"
    shutil.copytree(tiny, loud)
    tensors = load_file(loud / "model.safetensors")
    factors = 2.0 ** (torch.arange(160) % 15 - 7)
    for index in range(3):
        mlp = f"model.layers.{index}.mlp"
        tensors[f"{mlp}.up_proj.weight"] *= factors[:, None]
        tensors[f"{mlp}.down_proj.weight"] /= factors
    save_file(tensors, loud / "model.safetensors", {"format": "pt"})
    recipe = recipe_of(text, method, num_bits=8, group_size=None)
    manifest = quantize_checkpoint(loud, recipe, tmp_path / "out")
    for index in range(3):
        up = manifest.linears[f"model.layers.{index}.mlp.up_proj"]
        # a row's factor changes neither its codes nor its own error, only its share in the sum
        assert up.sqnr_db == pytest.approx(up.sqnr_rtn_db, abs=3)
        assert up.absorber is not None


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, None], ids=["groups", "channels"])
@torch.no_grad()
def test_transformers_loads_zero_points_in_every_width_and_grouping(
    tiny: Path, text: Path, tmp_path: Path, num_bits: int, group_size: int | None
) -> None:
    output = tmp_path / "out"
    recipe = recipe_of(text, "rtn", num_bits=num_bits, group_size=group_size, symmetric=False)
    quantize_checkpoint(tiny, recipe, output)
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert torch.allclose(
        loaded(tokens()).logits, dense_twin(tiny, output)(tokens()).logits, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_transformers_loads_linears_of_different_group_sizes(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    recipe = recipe_of(text, "gptq", group_size=80, group_size_fallback=[48], symmetric=True)
    manifest = quantize_checkpoint(tiny, recipe, output)
    assert {record.group_size for record in manifest.linears.values()} == {80, 48}
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert torch.allclose(
        loaded(tokens()).logits, dense_twin(tiny, output)(tokens()).logits, rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_attention_too_and_every_absorber_and_8_bits_keep_the_model_s_function(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    manifest = quantize_checkpoint(tiny, recipe_of(text, targets="*_proj", num_bits=8), output)
    assert len(manifest.linears) == 3 * 7
    logits = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)(tokens()).logits
    ours = dense_twin(tiny, output)(tokens()).logits
    # 8 bits cost 5 % here; a scale folded into the wrong place would cost everything.
    assert float((ours - logits).norm() / logits.norm()) < 0.15


def test_the_manifest_says_what_was_done(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    returned = quantize_checkpoint(tiny, recipe_of(text, targets="*_proj"), output)
    manifest = Manifest.model_validate_json((output / MANIFEST).read_text())
    assert manifest == returned
    assert manifest.inputs.keys() == {file.name for file in Checkpoint(tiny).files} | {str(text)}
    assert manifest.outputs.keys() == {file.name for file in output.iterdir()} - {MANIFEST}
    assert manifest.peak_memory_bytes > 1 << 20
    down, out = (manifest.linears[f"model.layers.1.{name}"] for name in ("mlp.down_proj", "self_attn.o_proj"))
    assert (down.method, down.num_bits, down.group_size, down.symmetric) == ("awq", 4, 32, False)
    assert down.absorber == "mlp.up_proj"
    assert down.alpha is not None
    assert down.clip_ratio is not None
    assert 0.5 <= down.clip_ratio <= 1
    assert 10 < down.sqnr_db < 60
    # One key-value head for three: no linear can absorb the scale, so there was no search.
    assert (out.absorber, out.alpha) == (None, None)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq", "awq+gptq", "smoothquant", "best"])
def test_a_dead_input_and_a_group_of_zeros_harm_no_method(
    tiny_copy: Path, text: Path, tmp_path: Path, method: str
) -> None:
    tensors = load_file(tiny_copy / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][5] = 0
    tensors["model.layers.1.mlp.gate_proj.weight"][3, 32:64] = 0
    save_file(tensors, tiny_copy / "model.safetensors", {"format": "pt"})
    manifest = quantize_checkpoint(tiny_copy, recipe_of(text, method), tmp_path / "out")
    gate = manifest.linears["model.layers.1.mlp.gate_proj"]
    assert gate.dead_inputs == (method != "rtn")  # which looks at no inputs
    assert gate.sqnr_db > 10
    written = Checkpoint(tmp_path / "out").linear("model.layers.1.mlp.gate_proj").dense()
    assert bool(written.isfinite().all())


def test_what_is_not_quantized_is_copied_bit_by_bit(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    quantize_checkpoint(tiny, recipe_of(text, "gptq"), output)
    before, after = load_file(tiny / "model.safetensors"), load_file(output / "model.safetensors")
    dense = {name for name in before if ".mlp." not in name}
    assert "model.embed_tokens.weight" in dense
    for name in dense:
        assert torch.equal(after[name], before[name])
    assert "lm_head.weight" not in after  # tied before, tied after
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (output / name).read_bytes() == (tiny / name).read_bytes()


def test_shards_hold_what_one_file_would(tiny: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text, "rtn")
    quantize_checkpoint(tiny, recipe, tmp_path / "one")
    quantize_checkpoint(tiny, recipe, tmp_path / "many", shard_bytes=100_000)
    one, many = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert set(one) == set(many)
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one)
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many")]
    logits = [model(tokens()).logits for model in loaded]
    assert torch.equal(*logits)


def test_layers_see_what_the_quantized_layers_before_them_make(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    for name, targets in (("all", "*.mlp.*"), ("last", "model.layers.2.mlp.*")):
        quantize_checkpoint(tiny, recipe_of(text, "gptq", targets=targets), tmp_path / name)
    module = "model.layers.2.mlp.down_proj"
    codes = [Checkpoint(tmp_path / name).tensor(f"{module}.weight_packed") for name in ("all", "last")]
    assert not torch.equal(*codes)


@pytest.mark.parametrize("method", ["awq", "gptq", "best"])
def test_the_same_recipe_gives_the_same_bytes(tiny: Path, text: Path, tmp_path: Path, method: str) -> None:
    for name in ("one", "two"):
        quantize_checkpoint(tiny, recipe_of(text, method), tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("targets", ["*.mlp.*", "*.mlp.gate_proj", "*"])
def test_leaving_out_what_nothing_waits_for_changes_no_byte(
    tiny: Path, text: Path, tmp_path: Path, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(text, "gptq", targets=targets, keep=("lm_head", "*.embed_tokens"))
    quantize_checkpoint(tiny, recipe, tmp_path / "one")
    monkeypatch.setattr(stream, "_last", lambda *_: None)
    quantize_checkpoint(tiny, recipe, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


KILLED = """
import os, signal, sys
from pathlib import Path
from qtool.core.recipe import Calibration, Recipe
from qtool.quantize.pipeline import quantize_checkpoint

def report(done, total, sqnr_db):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint, recipe, output = sys.argv[1:]
quantize_checkpoint(Path(checkpoint), Recipe.model_validate_json(recipe), Path(output), progress=report)
"""


def test_a_killed_run_resumes_and_ends_with_the_same_bytes(tiny: Path, text: Path, tmp_path: Path) -> None:
    recipe, killed = recipe_of(text, "gptq"), tmp_path / "killed"
    arguments = [sys.executable, "-c", KILLED, str(tiny), recipe.model_dump_json(), str(killed)]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    partial = tmp_path / "killed.partial"
    finished = sorted(partial.glob("layer-*.safetensors"))
    assert len(finished) == 2
    assert not killed.exists()
    written = [file.stat().st_mtime_ns for file in finished]

    after: list[int] = []

    def report(done: int, total: int, sqnr_db: float | None) -> None:
        after[:] = [file.stat().st_mtime_ns for file in finished]

    quantize_checkpoint(tiny, recipe, killed, progress=report)
    assert after == written  # finished layers were replayed, not made again
    assert not partial.exists()
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(killed) == contents(tmp_path / "straight")


@pytest.mark.parametrize("damage", ["one bit", "cut short", "no seal"])
def test_a_finished_layer_that_is_damaged_is_quantized_again_with_all_behind_it(
    tiny: Path, text: Path, tmp_path: Path, damage: str
) -> None:
    recipe = recipe_of(text, "gptq")
    arguments = [sys.executable, "-c", KILLED, str(tiny), recipe.model_dump_json(), str(tmp_path / "out")]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    first = tmp_path / "out.partial" / "layer-00000.safetensors"
    whole = first.read_bytes()
    if damage == "no seal":
        first.with_suffix(".sha256").unlink()
    else:
        first.write_bytes(whole[:-1] + (bytes([whole[-1] ^ 1]) if damage == "one bit" else b""))
    quantize_checkpoint(tiny, recipe, tmp_path / "out")
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


@torch.no_grad()
def test_a_corrected_layer_comes_closer_to_the_full_precision_model(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    # More tokens than down_proj has inputs, or there is nothing to learn from.
    calibration = Calibration(dataset=str(text), num_samples=16, seq_len=64)
    windows = windows_of(tiny, text, calibration)
    expected = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)(windows).logits
    lost = {}
    for correct in (False, True):
        recipe = recipe_of(text, "gptq", num_bits=3)
        (rule,) = recipe.quantization.rules
        rule = override(rule, method={"name": "gptq", "correct": correct})
        recipe = override(recipe, calibration=calibration, quantization={"rules": [rule]})
        output = tmp_path / str(correct)
        quantize_checkpoint(tiny, recipe, output)
        lost[correct] = float((dense_twin(tiny, output)(windows).logits - expected).norm())
    assert lost[True] < 0.9 * lost[False]


def test_a_killed_run_that_corrects_resumes_to_the_same_bytes(tiny: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text)
    rule = override(recipe.quantization.rules[0], method={"name": "awq+gptq", "correct": True})
    recipe = override(recipe, quantization={"rules": [rule]})

    def stop_later(done: int, total: int, sqnr_db: float | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, recipe, tmp_path / "stopped", progress=stop_later)
    quantize_checkpoint(tiny, recipe, tmp_path / "stopped")
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")


def test_a_folder_begun_with_another_recipe_is_refused(tiny: Path, text: Path, tmp_path: Path) -> None:
    def stop_later(done: int, total: int, sqnr_db: float | None) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, recipe_of(text, "gptq"), tmp_path / "out", progress=stop_later)
    with pytest.raises(
        UsageError, match=r"out\.partial: was begun with another quantization .* remove the folder"
    ):
        quantize_checkpoint(tiny, recipe_of(text, "awq"), tmp_path / "out")


def test_two_runs_into_one_folder_are_refused(tiny: Path, text: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    with (partial / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"out\.partial: another run is working there"):
            quantize_checkpoint(tiny, recipe_of(text), tmp_path / "out")
    quantize_checkpoint(tiny, recipe_of(text), tmp_path / "out")


def test_an_output_that_exists_is_refused(tiny: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        quantize_checkpoint(tiny, recipe_of(text), tmp_path)


def test_a_full_disk_leaves_no_output_and_the_run_resumes_when_there_is_room(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # a layer fits, the model does not
    try:
        with pytest.raises(QtoolError, match=r"out\.partial: could not be written \(File too large\)"):
            quantize_checkpoint(tiny, recipe_of(text), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(tiny, recipe_of(text), tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST).exists()


def test_folders_above_the_output_are_made(tiny: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "out"
    quantize_checkpoint(tiny, recipe_of(text, "rtn"), output)
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert (output / MANIFEST).exists()


def test_an_unwritable_place_is_an_error_before_any_work(tiny: Path, text: Path) -> None:
    with pytest.raises(QtoolError, match="cannot be created"):
        quantize_checkpoint(tiny, recipe_of(text), text / "out")


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        (
            {"group_size": 36},
            r"group_size 36 does not divide in_features 96 of model\.layers\.0\.mlp\.gate_proj; use 32, 48",
        ),
        (
            {"group_size": 256},
            r"group_size 256 does not divide in_features 96 of .*gate_proj; use 32, 48, 96",
        ),
        ({"targets": "*.moe.*"}, r"target '\*\.moe\.\*' matches no linear of the model"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(
    tiny: Path, text: Path, tmp_path: Path, recipe: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        quantize_checkpoint(tiny, recipe_of(text, **recipe), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_windows_beyond_the_model_s_positions_are_refused(tiny: Path, text: Path, tmp_path: Path) -> None:
    calibration = Calibration(dataset=str(text), seq_len=257)
    recipe = recipe_of(text).model_copy(update={"calibration": calibration})
    with pytest.raises(UsageError, match="seq_len 257 is beyond the model's 256 positions"):
        quantize_checkpoint(tiny, recipe, tmp_path / "out")


def test_a_quantized_checkpoint_is_not_quantized_again(tiny: Path, text: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny, recipe_of(text, "rtn"), tmp_path / "out")
    with pytest.raises(UsageError, match="is quantized already"):
        quantize_checkpoint(tmp_path / "out", recipe_of(text), tmp_path / "again")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (
            "mlp.up_proj.weight",
            torch.full((160, 96), torch.inf),
            r"layers\.1\.mlp\.up_proj\.weight: holds NaN",
        ),
        ("mlp.down_proj.bias", torch.zeros(96), r"holds model\.layers\.1\.mlp\.down_proj\.bias, which Llama"),
        ("mlp.up_proj.weight", torch.full((160, 96), 1e30), r"layers\.1\.mlp\.down_proj: its input reaches"),
    ],
)
def test_a_damaged_layer_is_an_error_that_names_it(
    tiny_copy: Path, text: Path, tmp_path: Path, name: str, value: Tensor, problem: str
) -> None:
    tensors = load_file(tiny_copy / "model.safetensors") | {f"model.layers.1.{name}": value}
    save_file(tensors, tiny_copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(QtoolError, match=problem):
        quantize_checkpoint(tiny_copy, recipe_of(text), tmp_path / "out")
