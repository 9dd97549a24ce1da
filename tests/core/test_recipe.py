from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from qtool.core.recipe import Awq, Calibration, Recipe, load_recipe, matches, override
from qtool.core.recipe_schemes import Frozen, IntWeights
from qtool.core.schemes import IntScheme
from qtool.errors import UsageError

RECIPE = """\
version: 1
quantization:
  rules:
    - targets: ["*.mlp.*"]
      weights: {num_bits: 4, group_size: 128}
      method: {name: awq, grid: 10}
"""


def _load(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load_recipe(path)


def _problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UsageError) as refused:
        _load(tmp_path, text)
    return str(refused.value).replace(f"{tmp_path}/", "").splitlines()


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    recipe = _load(tmp_path, RECIPE)
    assert recipe.calibration == Calibration()
    assert recipe.quantization.rules[0].method == Awq(grid=10)
    assert recipe.quantization.keep == ("*.self_attn.*", "lm_head", "*.embed_tokens")


def test_a_method_may_be_its_name_alone(tmp_path: Path) -> None:
    recipe = _load(tmp_path, RECIPE.replace("{name: awq, grid: 10}", "awq"))
    assert recipe.quantization.rules[0].method == Awq()


def test_a_recipe_survives_being_written_and_read(tmp_path: Path) -> None:
    recipe = _load(tmp_path, RECIPE)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("written", "instead", "problem"),
    [
        ("version:", "verson:", "r.yaml:1: verson: unknown key; did you mean 'version'?"),
        ("version: 1", "version: 2", "r.yaml:1: version: should be 1 (got 2)"),
        (
            "num_bits",
            "nun_bits",
            "r.yaml:5: quantization.rules[0].weights.nun_bits: unknown key; did you mean 'num_bits'?",
        ),
        (
            "grid",
            "gird",
            "r.yaml:6: quantization.rules[0].method.gird: unknown key; did you mean 'grid'?",
        ),
        (
            "name: awq",
            "name: awk",
            "r.yaml:6: quantization.rules[0].method: 'awk' is not known; did you mean 'awq'?",
        ),
        ("name: awq, ", "", "r.yaml:6: quantization.rules[0].method: lacks 'name'"),
        ('["*.mlp.*"]', "[]", "r.yaml:4: quantization.rules[0].targets: should have at least 1 item"),
        ('["*.mlp.*"]', "mlp", "r.yaml:4: quantization.rules[0].targets: should be a list (got 'mlp')"),
        (
            "group_size: 128",
            "group_size: 4",
            "r.yaml:5: quantization.rules[0].weights.group_size: "
            "should be greater than or equal to 8 (got 4)",
        ),
        (
            '"*.mlp.*"',
            '"re:("',
            "r.yaml:4: quantization.rules[0].targets[0]: is not a regular expression: "
            "missing ) at position 1 (got 're:(')",
        ),
        ("version: 1", "version: 1\nversion: 1", "r.yaml:2: version: appears twice"),
        (
            "{num_bits: 4, group_size: 128}",
            "[1]",
            "r.yaml:5: quantization.rules[0].weights: should be a name or a mapping (got [1])",
        ),
        (
            "{num_bits: 4, group_size: 128}",
            "null",
            "r.yaml:5: quantization.rules[0].weights: should be a name or a mapping (got None)",
        ),
        (
            "{name: awq, grid: 10}",
            "2020-01-01",
            "r.yaml:6: quantization.rules[0].method: should be a name or a mapping "
            "(got datetime.date(2020, 1, 1))",
        ),
        (
            "method:",
            "activations: [1]\n      method:",
            "r.yaml:6: quantization.rules[0].activations: should be a name or a mapping (got [1])",
        ),
        ("version: 1", "evaluation: 3", "r.yaml:1: evaluation: should be a mapping (got 3)"),
    ],
)
def test_one_mistake_is_one_line_that_says_where_and_what(
    tmp_path: Path, written: str, instead: str, problem: str
) -> None:
    assert _problems(tmp_path, RECIPE.replace(written, instead)) == [problem]


def test_every_mistake_is_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = RECIPE.replace("grid", "gird").replace("targets", "target") + "models: x\n"
    lines = [problem.split(":")[1] for problem in _problems(tmp_path, text)]
    assert lines == ["4", "4", "6", "7"]


@pytest.mark.parametrize(
    ("text", "where"),
    [("", "recipe"), ("[1]", "recipe"), ("just words", "recipe"), ("quantization: 3", "quantization")],
)
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str, where: str) -> None:
    assert f"r.yaml:1: {where}: should be a mapping" in _problems(tmp_path, text)[0]


def test_broken_yaml_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    assert "is not valid YAML" in _problems(tmp_path, "a: [")[0]
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x: 1\n? [a]\n: 1", "r.yaml:2: has a list for a key, wanted a word"),
        ("{{a: 1}: 1}", "r.yaml:1: has a mapping for a key, wanted a word"),
        ("a: !!set {[1]}", "r.yaml:1: has a list for a key, wanted a word"),
        ("x: 1\na: b: c", "r.yaml:2: is not valid YAML: mapping values are not allowed here"),
        (
            "a: '\n",
            "r.yaml:2: is not valid YAML: while scanning a quoted scalar, found unexpected end of stream",
        ),
        (
            "a: {<<: 3}",
            "r.yaml:1: is not valid YAML: while constructing a mapping, "
            "expected a mapping or list of mappings for merging, but found scalar",
        ),
        (
            "a: \0",
            "r.yaml: is not valid YAML: unacceptable character #x0000: special characters are not allowed in "
            '"<unicode string>", position 3',
        ),
    ],
)
def test_what_a_parser_says_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    assert _problems(tmp_path, text) == [problem]


def test_a_fallback_for_a_group_that_always_fits_is_refused(tmp_path: Path) -> None:
    text = RECIPE.replace("group_size: 128", "group_size: null, group_size_fallback: [64]")
    assert "group_size_fallback has no use" in _problems(tmp_path, text)[0]


@pytest.mark.parametrize(
    ("in_features", "group_size"), [(1536, 128), (576, 64), (96, 32), (100, None), (128, 128)]
)
def test_the_first_group_size_that_divides_is_used(in_features: int, group_size: int | None) -> None:
    weights = IntWeights(group_size=128, group_size_fallback=(64, 32))
    expected = None if group_size is None else IntScheme(4, group_size, True)
    assert weights.scheme(in_features) == expected


def test_a_group_size_of_null_is_the_whole_channel() -> None:
    assert IntWeights(group_size=None).scheme(97) == IntScheme(4, None, True)


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("*.mlp.*", "model.layers.0.mlp.up_proj", True),
        ("*.mlp.*", "model.layers.0.self_attn.q_proj", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        (r"re:.*\.layers\.[0-3]\..*", "model.layers.3.mlp.up_proj", True),
        (r"re:.*\.layers\.[0-3]\..*", "model.layers.13.mlp.up_proj", False),
        ("*.layers.1?.*", "model.layers.1.mlp.up_proj", False),
        ("*.MLP.*", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_a_pattern_fits_the_whole_name(pattern: str, module: str, fits: bool) -> None:
    assert matches(pattern, module) is fits


def test_override_checks_what_it_puts_in() -> None:
    assert override(Calibration(), num_samples=3, seq_len=None).num_samples == 3
    with pytest.raises(UsageError, match="num_samples"):
        override(Calibration(), num_samples=0)


def test_a_pattern_that_would_take_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qtool.core.recipe._MATCH_SECONDS", 0.1)
    with pytest.raises(UsageError, match=r"is not matched with model\.layers\.0\.mlp\.up_proj after"):
        matches("re:(.|.)*[!?]", "model.layers.0.mlp.up_proj")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "r.yaml:5: has more than 10000 values, aliases written out; write fewer"),
        ("a: &a [*a]\n", "r.yaml:1: an alias stands for what it is part of"),
        ("quantization: &a {rules: *a}\n", "r.yaml:1: an alias stands for what it is part of"),
        ("&a x: {? *a : 1, y: &b {z: *b}}\n", "r.yaml:1: an alias stands for what it is part of"),
        ("a: " + "[" * 5000, "r.yaml: is nested too deeply, wanted at most 50 levels"),
        ("a: " + "[" * 60 + "]" * 60, "r.yaml:1: is nested too deeply, wanted at most 50 levels"),
        ("# " + "x" * 300_000, "r.yaml: has 300002 characters, wanted at most 262144"),
    ],
    ids=["bomb", "itself", "key", "mapping", "unclosed", "deep", "long"],
)
def test_a_file_that_stands_for_too_much_is_refused_at_once(tmp_path: Path, text: str, problem: str) -> None:
    assert _problems(tmp_path, text) == [problem]


@pytest.mark.parametrize("value", ["2020-13-45", "1" * 5000], ids=["date", "number"])
def test_a_value_that_yaml_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    (problem,) = _problems(tmp_path, f"seed: {value}\n")
    assert problem.startswith("r.yaml: is not valid YAML: ")


def test_aliases_that_save_some_typing_are_welcome(tmp_path: Path) -> None:
    again = """\
    - targets: &attention ["*.self_attn.*"]
      weights: &format {num_bits: 8}
    - targets: *attention
      weights: *format
"""
    assert len(_load(tmp_path, RECIPE + again).quantization.rules) == 3


@pytest.mark.parametrize(
    ("written", "instead", "problem"),
    [
        ("grid: 10", "grid: 1001", "method.grid: should be less than or equal to 1000 (got 1001)"),
        ("version: 1", f"calibration: {{seed: {2**63}}}", f"calibration.seed: should be less than {2**63}"),
        (
            "version: 1",
            "evaluation: {gates: {max_kl: .inf}}",
            "r.yaml:1: evaluation.gates.max_kl: should be a finite number (got inf)",
        ),
    ],
)
def test_numbers_have_their_limits(tmp_path: Path, written: str, instead: str, problem: str) -> None:
    (found,) = _problems(tmp_path, RECIPE.replace(written, instead))
    assert problem in found


def _parts(part: type[Frozen] = Frozen) -> Iterator[type[Frozen]]:
    for kind in part.__subclasses__():
        yield kind
        yield from _parts(kind)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_no_number_of_a_recipe_is_anything_but_finite(value: float) -> None:
    tried = set()
    for part in _parts():
        for name, field in part.model_fields.items():
            if float not in (field.annotation, *get_args(field.annotation)):
                continue
            with pytest.raises(ValidationError) as refused:
                part.model_validate({name: value})
            assert ("finite_number", (name,)) in [(one["type"], one["loc"]) for one in refused.value.errors()]
            tried.add(name)
    assert {"max_kl", "average_bits", "damping", "alpha", "min_top1"} <= tried
