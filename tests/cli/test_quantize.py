import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.conftest import Ended, Qtool
from tests.mixtures import write_mixture

RECIPE = """\
version: 1
calibration: {num_samples: 2, seq_len: 16}
quantization:
  rules:
    - targets: ["*.mlp.*"]
      weights: {group_size: 32}
      method: rtn
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_the_manifest_is_all_that_json_prints(qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", output, "--num-samples", "3", "--json")
    assert ended.code == 0, ended.err
    manifest = json.loads(ended.out)
    assert manifest["recipe"]["calibration"]["num_samples"] == 3
    assert manifest["recipe"]["calibration"]["seq_len"] == 16
    assert manifest == json.loads((output / "qtool_manifest.json").read_text())
    assert [line.split()[1] for line in ended.err.splitlines()] == ["0/3", "1/3", "2/3", "3/3"]


@pytest.mark.parametrize(
    ("rule", "warned"),
    [
        ("{weights: {group_size: 32}, method: awq}", False),
        ("{weights: {group_size: 32, symmetric: false}, method: awq}", True),
        ("{weights: {num_bits: 8, group_size: null}, activations: int8, method: smoothquant}", True),
    ],
)
def test_experts_that_saw_too_little_or_that_transformers_does_not_load_come_with_warnings(
    qtool: Qtool, recipe: Path, tmp_path: Path, rule: str, warned: bool
) -> None:
    rule = rule.replace("{", "{targets: ['*.experts.*'], ", 1)
    head = "version: 1\ncalibration: {num_samples: 1, seq_len: 12}\n"
    recipe.write_text(f"{head}quantization: {{rules: [{rule}]}}\n")
    mixture = write_mixture("mixtral", tmp_path / "mixture")
    ended = qtool("quantize", mixture, "--recipe", recipe, "-o", tmp_path / "out")
    assert ended.code == 0, ended.err
    said = " ".join(ended.err.split())
    assert re.search(
        r"were rounded to nearest: model\.layers\.0\.block_sparse_moe\.experts\.\d \(\d+\)", said
    )
    assert "set calibration.all_experts: true" in said
    assert ("transformers does not load these experts" in said) is warned
    try:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    except RuntimeError:
        assert warned


# 48 divides the 96 inputs of gate_proj and up_proj, 32 the 160 of down_proj.
@pytest.mark.parametrize(
    ("weights", "warned"),
    [
        ("{group_size: 48, group_size_fallback: [32], symmetric: false}", True),
        ("{group_size: 48, group_size_fallback: [32], symmetric: true}", False),
        ("{group_size: 32, symmetric: false}", False),
    ],
)
def test_a_checkpoint_that_transformers_does_not_load_comes_with_a_warning(
    qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path, weights: str, warned: bool
) -> None:
    recipe.write_text(RECIPE.replace("{group_size: 32}", weights))
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert ("warning: transformers does not load zero points" in ended.err) is warned
    try:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    except RuntimeError:
        assert warned
    else:
        assert not warned


def test_the_recipe_names_the_model_unless_the_command_line_does(
    qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path
) -> None:
    ended = qtool("quantize", "--recipe", recipe, "-o", tmp_path / "out")
    assert ended.code == 2
    assert "names no model" in ended.err
    recipe.write_text(f"model: {tiny}\n{RECIPE}")
    ended = qtool("quantize", "--recipe", recipe, "-o", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert ended.out.endswith(f"{tmp_path / 'out'}\n")
    recipe.write_text(f"model: /nowhere\n{RECIPE}")
    assert qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / "other").code == 0


def _assert_refused(ended: Ended, code: int, *said: str) -> None:
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert ended.err.startswith("error: ")
    for words in said:
        assert words in ended.err


def test_a_folder_that_is_no_checkpoint(qtool: Qtool, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = qtool("quantize", tmp_path / "empty", "--recipe", recipe, "-o", tmp_path / "out")
    _assert_refused(ended, 2, str(tmp_path / "empty"), "no config.json")


def test_a_name_that_is_no_model_at_all(qtool: Qtool, recipe: Path, tmp_path: Path) -> None:
    ended = qtool("quantize", "smollm2-135m-instrukt", "--recipe", recipe, "-o", tmp_path / "out")
    _assert_refused(ended, 2, "no such folder", "did you mean 'smollm2-135m-instruct'?", "hub id")


def test_a_truncated_safetensors_file(qtool: Qtool, tiny_copy: Path, recipe: Path, tmp_path: Path) -> None:
    weights = tiny_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    ended = qtool("quantize", tiny_copy, "--recipe", recipe, "-o", tmp_path / "out")
    _assert_refused(ended, 1, str(weights), "truncated", "fetch the checkpoint again")


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("group_size: 32", "group_sise: 32", ":6: quantization.rules[0].weights.group_sise: unknown key"),
        (
            "group_size: 32",
            "group_size: 64",
            "does not divide in_features 96 of model.layers.0.mlp.gate_proj",
        ),
        ("*.mlp.*", "*.mpl.*", "target '*.mpl.*' matches no linear"),
        ("rtn", "rnt", "did you mean 'rtn'?"),
    ],
    ids=["a misspelt key", "a group size that divides nothing", "targets that match nothing", "a method"],
)
def test_a_recipe_that_does_not_fit(
    qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path, written: str, instead: str, said: str
) -> None:
    recipe.write_text(RECIPE.replace(written, instead))
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / "out")
    _assert_refused(ended, 2, said)
    assert not list(tmp_path.glob("*out*"))


def test_an_empty_calibration_file(qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("")
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / "out", "--dataset", text)
    _assert_refused(ended, 2, str(text))


def test_an_output_that_exists_is_left_alone(qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", output)
    _assert_refused(ended, 2, f"{output}: already exists")
    assert not list(output.iterdir())


def test_an_output_below_a_file(qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", recipe / "out")
    _assert_refused(ended, 1, str(recipe / "out"), "is no folder")


# Layers of 200 kB fit the first limit and the checkpoint of 500 kB does not; nothing fits the second.
@pytest.mark.parametrize("limit", [300_000, 5_000])
def test_a_full_disk_leaves_no_checkpoint(tiny: Path, recipe: Path, tmp_path: Path, limit: int) -> None:
    command = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    command += "from qtool.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", command, "quantize", tiny, "--recipe", recipe, "-o", tmp_path / "out"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "File too large" in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_says_that_it_can_go_on(
    qtool: Qtool, tiny: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qtool.quantize.pipeline.quantize_checkpoint", interrupt)
    ended = qtool("quantize", tiny, "--recipe", recipe, "-o", tmp_path / "out")
    assert (ended.code, ended.out) == (130, "")
    assert "run the same command again to go on from the last finished layer" in ended.err
