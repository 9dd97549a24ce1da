import json
import resource
from pathlib import Path

import pytest

from qtool.errors import QtoolError
from tests.cli.conftest import Qtool


def test_compile_prints_the_engine_folder(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    ended = qtool("compile", tiny, "--target", "reference", "-o", output)
    assert (ended.code, ended.out) == (0, f"{output}\n"), ended.err
    assert (output / "engine.json").is_file()


def test_verify_prints_the_drift_of_the_graph_and_then_the_folder(
    qtool: Qtool, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "engine"
    ended = qtool("compile", tiny, "--target", "onnx", "-o", output, "--verify")
    assert ended.code == 0, ended.err
    assert "top-1 agreement" in ended.out
    assert ended.out.endswith(f"{output}\n")


def test_an_engine_that_fails_to_verify_is_kept_and_that_is_said(
    qtool: Qtool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise QtoolError("logits are not finite")

    monkeypatch.setattr("qtool.eval.verify.verify", fail)
    output = tmp_path / "engine"
    ended = qtool("compile", tiny, "--target", "reference", "-o", output, "--verify")
    assert (ended.code, ended.out) == (1, "")
    assert "engine: is built and was kept, but verifying it failed: logits are not finite" in ended.err
    assert (output / "engine.json").is_file()


def test_a_number_that_an_option_cannot_be_is_told(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    options = ("--target", "openvino", "--dynamic-quantization", "33")
    ended = qtool("compile", tiny, *options, "-o", tmp_path / "engine")
    assert ended.code == 2
    assert "dynamic_quantization: should be 32, 64 or 128 (got 33)" in ended.err


def test_an_unknown_architecture_is_named(qtool: Qtool, tiny_copy: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_copy / "config.json").read_text())
    config["architectures"] = ["NovelForCausalLM"]
    (tiny_copy / "config.json").write_text(json.dumps(config))
    ended = qtool("compile", tiny_copy, "--target", "reference", "-o", tmp_path / "engine")
    assert (ended.code, ended.out) == (1, "")
    assert "NovelForCausalLM" in ended.err
    assert not list(tmp_path.glob("*engine*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--target", "openvin"), "openvino"),
        (("--target", "reference", "--kv-cache", "u3"), "f32"),
    ],
)
def test_an_unknown_target_or_precision_lists_the_known(
    qtool: Qtool, tiny: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    ended = qtool("compile", tiny, *options, "-o", tmp_path / "engine")
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert not list(tmp_path.glob("*engine*"))


def test_an_engine_that_exists_is_left_alone(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    ended = qtool("compile", tiny, "--target", "reference", "-o", tmp_path)
    assert ended.code == 2
    assert f"{tmp_path}: already exists" in ended.err


# OpenVINO says no more than "basic_ios::clear: iostream error".
@pytest.mark.parametrize("target", ["openvino", "onnx"])
def test_a_full_disk_leaves_no_engine(qtool: Qtool, tiny: Path, tmp_path: Path, target: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        ended = qtool("compile", tiny, "--target", target, "-o", tmp_path / "engine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ended.code, ended.out) == (1, "")
    assert "engine: could not be written (File too large)" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["", '{"a": 1}', None], ids=["empty", "another", "missing"])
def test_a_checkpoint_whose_tokenizer_cannot_serve_is_refused_before_any_work(
    qtool: Qtool, tiny_copy: Path, tmp_path: Path, damage: str | None
) -> None:
    file = tiny_copy / "tokenizer.json"
    file.unlink() if damage is None else file.write_text(damage)
    ended = qtool("compile", tiny_copy, "--target", "openvino", "-o", tmp_path / "engine")
    assert (ended.code, ended.out) == (1, "")
    assert str(file) in ended.err
    assert not (tmp_path / "engine").exists()
