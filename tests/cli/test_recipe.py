import json
from pathlib import Path

import pytest
import yaml

from qtool.recipes import shipped
from tests.cli.conftest import Qtool

GOOD = """\
version: 1
description: for a test
quantization:
  rules:
    - targets: ["*.mlp.*"]
      method: rtn
"""


def test_every_shipped_recipe_is_listed_with_a_description_and_checks_ok(qtool: Qtool) -> None:
    assert {"awq4", "gptq4", "rtn4"} <= set(shipped())
    lines = qtool("recipe", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())
    assert all(len(line.split()) > 1 for line in lines)
    assert qtool("recipe", "check", *shipped()).code == 0


@pytest.mark.parametrize("name", ["awq4", "awq4.yaml"])
def test_show_prints_the_file_of_a_shipped_recipe(qtool: Qtool, name: str) -> None:
    assert qtool("recipe", "show", name).out == shipped()["awq4"].read_text()


def test_show_resolved_fills_in_the_defaults(qtool: Qtool, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    resolved = yaml.safe_load(qtool("recipe", "show", tmp_path / "r.yaml", "--resolved").out)
    assert resolved["quantization"]["rules"][0]["method"] == {"name": "rtn", "search_range": False}
    assert resolved["calibration"]["num_samples"] == 128


def test_an_unknown_name_gives_the_nearest_known(qtool: Qtool) -> None:
    ended = qtool("recipe", "show", "awq5")
    assert (ended.code, ended.out) == (2, "")
    assert "did you mean 'awq4'?" in ended.err


def test_check_tells_all_problems_of_all_files_and_which_are_ok(qtool: Qtool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("method:", "methd:") + "calibraton: {}\n")
    ended = qtool("recipe", "check", bad, good, tmp_path / "none.yaml")
    assert ended.code == 2
    assert ended.out == f"{good}: ok\n"
    problems = ended.err.removeprefix("error: ").splitlines()
    assert len(problems) == 3
    assert problems[0] == f"{bad}:6: quantization.rules[0].methd: unknown key; did you mean 'method'?"
    assert problems[1] == f"{bad}:7: calibraton: unknown key; did you mean 'calibration'?"
    assert "none.yaml: neither a file nor a shipped recipe" in problems[2]


def test_check_holds_the_engines_to_build_to_what_their_targets_can(qtool: Qtool, tmp_path: Path) -> None:
    for engine, problem in (
        ("{target: onxx}", "did you mean 'onnx'?"),
        ("{target: onnx, kv_cache: u8}", "kv_cache 'u8' is not possible for target onnx; wanted f32"),
    ):
        path = tmp_path / "recipe.yaml"
        path.write_text(GOOD + f"compile: [{engine}]\n")
        ended = qtool("recipe", "check", path)
        assert (ended.code, ended.out) == (2, "")
        assert str(path) in ended.err
        assert problem in ended.err


def test_the_schema_is_json_and_lets_a_method_be_a_name_or_a_mapping(qtool: Qtool) -> None:
    schema = json.loads(qtool("recipe", "schema").out)
    method = schema["$defs"]["Rule"]["properties"]["method"]["anyOf"]
    names = {"enum": ["rtn", "awq", "gptq", "awq+gptq", "smoothquant", "best"], "type": "string"}
    assert names in method
    assert {"$ref": "#/$defs/Awq"} in method


def test_the_documented_recipe_is_valid_and_says_every_key(qtool: Qtool, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    documented = tmp_path / "documented.yaml"
    documented.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert qtool("recipe", "check", documented).code == 0
    schema = json.loads(qtool("recipe", "schema").out)
    # a backend's own options are left to the schema
    sections = [one for name, one in schema["$defs"].items() if not name.endswith("Options")]
    keys = set(schema["properties"]).union(*(one["properties"] for one in sections))
    assert {key for key in keys if f"{key}:" not in page and f"`{key}`" not in page} == set()


def test_check_for_a_model_prints_what_would_become_of_it(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    windows = "calibration: {num_samples: 2, seq_len: 24}\n"
    good.write_text(GOOD + "      weights: fp8\n" + windows)
    bad.write_text(GOOD + windows)  # groups of 128, and 96 inputs
    lost = tmp_path / "lost.yaml"
    lost.write_text(good.read_text() + "evaluation: {dataset: lost.txt}\n")
    ended = qtool("recipe", "check", bad, good, lost, "--checkpoint", tiny)
    assert ended.code == 2
    assert f"{lost}: lost.txt: cannot be read" in ended.err
    assert f"{bad}: quantization: weights.group_size 128 does not divide in_features 96" in ended.err
    lines = ended.out.splitlines()
    assert lines[0] == f"{good}: ok"
    assert lines[-1].endswith("KV cache as it is; calibrates on nothing")
    (row,) = [line for line in lines if "gate_proj" in line]
    assert [cell.strip() for cell in row.split("│")[1:4]] == ["9", "fp8, channel", "rtn"]
