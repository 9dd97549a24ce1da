"""What differs between two checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.core.manifest import MANIFEST, LinearRecord, Manifest
from qtool.core.recipe import Recipe
from qtool.core.schemes import Fp8Scheme, IntScheme, KvCacheScheme, LinearScheme
from tests.cli.conftest import Qtool
from tests.core.quantized import FP8_DYNAMIC, NVFP4, write_scheme

INT4 = LinearScheme(IntScheme(4, 32, False))
MODULE = "model.layers.1.mlp.up_proj"


def compared(qtool: Qtool, a: Path, b: Path) -> dict[str, dict[str, Any]]:
    ended = qtool("diff", a, b, "--json")
    assert (ended.code, ended.err) == (0, "")
    return {one["name"]: one for one in json.loads(ended.out)}


@pytest.fixture
def int4(tiny: Path, tmp_path: Path) -> Path:
    write_scheme(tiny, tmp_path / "int4", INT4)
    return tmp_path / "int4"


def test_a_checkpoint_is_the_same_as_itself_in_another_format(tiny: Path, int4: Path, qtool: Qtool) -> None:
    awq = int4.with_name("awq")
    write_scheme(tiny, awq, INT4, "awq")
    found = compared(qtool, int4, awq)
    assert len(found) == 3 * 7 + 3 * 2 + 2  # linears, norms of the layers, embeddings and the last norm
    assert found[MODULE]["same_codes"] is True
    assert {one["max_abs"] for one in found.values()} == {0.0}
    ended = qtool("diff", int4, awq, "--exit-code")
    assert ended.code == 0
    assert "29 of 29 are the same" in ended.out


@pytest.mark.parametrize("weight", [IntScheme(4, 32, True), IntScheme(4, None, True)], ids=str)
def test_a_conversion_there_and_back_is_no_difference(
    tiny: Path, tmp_path: Path, qtool: Qtool, weight: IntScheme
) -> None:
    write_scheme(tiny, tmp_path / "a", LinearScheme(weight))
    assert qtool("convert", tmp_path / "a", tmp_path / "there", "-f", "gptq").code == 0
    assert qtool("convert", tmp_path / "there", tmp_path / "b", "-f", "compressed-tensors").code == 0
    ended = qtool("diff", tmp_path / "a", tmp_path / "b", "--exit-code")
    assert ended.code == 0, ended.out


def test_a_zero_point_that_is_used_is_no_spelling(tiny: Path, int4: Path, qtool: Qtool) -> None:
    symmetric = int4.with_name("symmetric")
    write_scheme(tiny, symmetric, LinearScheme(IntScheme(4, 32, True)))
    found = compared(qtool, int4, symmetric)
    assert (found[MODULE]["same_format"], found[MODULE].get("same_codes")) == (False, None)


def test_one_code_that_differs_is_found_and_measured(int4: Path, qtool: Qtool) -> None:
    other = Path(shutil.copytree(int4, int4.with_name("other")))
    tensors = load_file(other / "model.safetensors")
    words = tensors[f"{MODULE}.weight_packed"]
    words[3, 2] ^= 1  # the lowest bit of one code
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    found = compared(qtool, int4, other)
    assert found[MODULE]["same_codes"] is False
    scale = float(tensors[f"{MODULE}.weight_scale"][3, 0])
    assert found[MODULE]["max_abs"] == pytest.approx(scale, rel=1e-5)
    assert found[MODULE]["mean_abs"] == pytest.approx(scale / (160 * 96), rel=1e-5)
    assert [name for name, one in found.items() if one["max_abs"]] == [MODULE]
    ended = qtool("diff", int4, other, "--exit-code")
    assert ended.code == 1
    assert "28 of 29 are the same" in ended.out


def test_number_formats_are_compared_by_their_numbers(tiny: Path, int4: Path, qtool: Qtool) -> None:
    other = int4.with_name("mixed")
    schemes = {"up_proj": LinearScheme(NVFP4), "mlp": LinearScheme(Fp8Scheme(1, None), FP8_DYNAMIC)}
    write_scheme(tiny, other, schemes, kv_cache=KvCacheScheme("fp8"))
    found = compared(qtool, int4, other)
    one = found[MODULE]
    assert one["a"] == {"scheme": "int4 asymmetric, group 32", "num_bits": 4}
    assert one["b"] == {"scheme": "nvfp4, group 16", "num_bits": 4}
    assert "same_codes" not in one
    assert 0 < one["relative"] < 0.2  # both lose about a tenth
    query = found["model.layers.0.self_attn.q_proj"]
    assert query["b"] == {"scheme": "float32", "num_bits": 32}
    ended = qtool("diff", int4, other)
    assert ended.code == 0
    assert "8 of 29 are the same" in ended.out


def test_what_only_one_has_is_said(tiny: Path, int4: Path, qtool: Qtool) -> None:
    other = Path(shutil.copytree(tiny, int4.with_name("other")))
    tensors = load_file(other / "model.safetensors")
    tensors[f"{MODULE}.bias"] = torch.ones(160)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    found = compared(qtool, tiny, other)
    assert found[f"{MODULE}.bias"] == {
        "name": f"{MODULE}.bias",
        "b": {"scheme": "float32", "num_bits": 32},
    }
    assert qtool("diff", tiny, other, "--exit-code").code == 1


def record(sqnr_db: float) -> LinearRecord:
    return LinearRecord(
        method="awq",
        scheme="int4 symmetric, group 32",
        num_bits=4,
        group_size=32,
        symmetric=True,
        tokens=4096,
        dead_inputs=0,
        sqnr_rtn_db=18.0,
        sqnr_db=sqnr_db,
    )


def test_manifests_are_compared_by_their_records(tmp_path: Path, qtool: Qtool) -> None:
    recipe = Recipe.model_validate({"quantization": {"rules": [{"targets": ["*"]}]}})
    for name, sqnr in (("a", 20.5), ("b", 21.5)):
        manifest = Manifest(
            recipe=recipe,
            inputs={},
            outputs={},
            versions={},
            seed=0,
            linears={MODULE: record(sqnr), "model.layers.0.mlp.up_proj": record(20.5)},
            seconds=1.0,
            peak_memory_bytes=1,
        )
        (tmp_path / name).mkdir()
        manifest.save(tmp_path / name)
    a, b = (tmp_path / name / MANIFEST for name in "ab")
    found = compared(qtool, a, b)
    records = [side["record"] for side in (found[MODULE]["a"], found[MODULE]["b"])]
    assert [(one["sqnr_rtn_db"], one["sqnr_db"]) for one in records] == [(18.0, 20.5), (18.0, 21.5)]
    ended = qtool("diff", a, b, "--exit-code")
    assert ended.code == 1
    assert "1 of 2 are the same" in ended.out
    assert qtool("diff", a, a, "--exit-code").code == 0


def test_a_manifest_of_another_version_does_not_hinder(
    int4: Path, qtool: Qtool, caplog: pytest.LogCaptureFixture
) -> None:
    (int4 / MANIFEST).write_text('{"schema_version": 0}')
    assert qtool("diff", int4, int4).code == 0
    assert "wanted a manifest of this version of qtool; its records are left out" in caplog.text


def test_things_that_cannot_be_compared_are_refused(tiny: Path, tmp_path: Path, qtool: Qtool) -> None:
    ended = qtool("diff", tiny, tmp_path / "none")
    assert (ended.code, ended.out) == (2, "")
    assert "wanted two checkpoint folders, or two qtool_manifest.json files" in " ".join(ended.err.split())
    (tmp_path / "a.json").write_text("{}")
    ended = qtool("diff", tmp_path / "a.json", tmp_path / "a.json")
    assert ended.code == 1
    assert "a.json: recipe: Field required" in ended.err
    assert "wanted a manifest of this version of qtool" in ended.err
