"""Engine folders: what they hold, and what is refused before anything is written."""

import json
import shutil
from pathlib import Path

import openvino
import pytest

from qtool.compile.build import compile_engine
from qtool.compile.engine import EngineSpec, read_spec
from qtool.compile.inspection import inspect
from qtool.core.files import sha256
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import open_engine
from tests.compile.checkpoints import edit_config


@pytest.mark.parametrize("target", ["openvino", "reference"])
def test_an_engine_folder_says_what_it_is(target: str, tiny: Path, tmp_path: Path) -> None:
    spec = compile_engine(tiny, target, tmp_path / "engine", kv_cache="f16")
    assert read_spec(tmp_path / "engine") == spec
    assert (spec.target, spec.architecture, spec.kv_cache) == (target, "LlamaForCausalLM", "f16")
    assert (spec.vocab_size, spec.max_context, spec.block_size) == (320, 256, 32)
    assert spec.kv_bytes_per_token == 3 * 2 * 32 * 2  # layers, key and value, head_dim, bytes
    assert spec.checkpoint["model.safetensors"] == sha256(tiny / "model.safetensors")
    assert spec.versions["openvino"]
    weights = (tiny / "model.safetensors").stat().st_size
    assert weights * 0.9 < spec.weight_bytes < weights * 1.1


@pytest.mark.parametrize("target", ["openvino", "reference"])
def test_the_tokenizer_travels_with_the_engine(target: str, tiny: Path, tmp_path: Path) -> None:
    compile_engine(tiny, target, tmp_path / "engine")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (tmp_path / "engine" / name).read_bytes() == (tiny / name).read_bytes()


def test_an_unknown_target_is_refused_with_those_that_are_known(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"target 'openvin' is unknown; did you mean 'openvino'.*reference"):
        compile_engine(tiny, "openvin", tmp_path / "engine")
    with pytest.raises(
        UsageError, match=r"kv_cache 'u8' is not possible for target reference; wanted f32, f16"
    ):
        compile_engine(tiny, "reference", tmp_path / "engine", kv_cache="u8")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_compiled_leaves_nothing_behind(tiny_copy: Path, tmp_path: Path) -> None:
    edit_config(tiny_copy, mlp_bias=True)
    with pytest.raises(QtoolError, match=r"gate_proj has no bias, config\.json says otherwise"):
        compile_engine(tiny_copy, "openvino", tmp_path / "engines" / "one")
    edit_config(tiny_copy, architectures=["MambaForCausalLM"])
    with pytest.raises(QtoolError, match=r"'MambaForCausalLM' is not supported"):
        compile_engine(tiny_copy, "openvino", tmp_path / "engines" / "one")
    assert not list((tmp_path / "engines").iterdir())


@pytest.mark.parametrize("free", [1000, 10**12])
def test_a_full_disk_is_told_where_openvino_says_only_that_a_stream_failed(
    free: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(openvino, "save_model", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    told = (QtoolError, "No space left on device") if free == 1000 else (RuntimeError, "iostream")
    with pytest.raises(told[0], match=told[1]):
        compile_engine(tiny, "openvino", tmp_path / "engine")
    assert not list(tmp_path.iterdir())


def test_an_engine_that_exists_is_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        compile_engine(tiny, "openvino", tmp_path)


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("openvino", "model.bin"),
        ("openvino", "model.xml"),
        ("onnx", "model.onnx.data"),
        ("reference", "model.safetensors"),
    ],
)
def test_an_engine_whose_files_are_cut_or_missing_is_refused_by_name(
    target: str, file: str, tiny: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    spec = compile_engine(tiny, target, engine)
    content = (engine / file).read_bytes()
    assert spec.files[file] == len(content)
    (engine / file).unlink()  # not the file of the checkpoint, which may be the same
    (engine / file).write_bytes(content[:-1])
    for read in (inspect, open_engine):
        with pytest.raises(QtoolError, match=rf"{file}: has {len(content) - 1} bytes, engine.json says"):
            read(engine)
    (engine / file).unlink()
    for read in (inspect, open_engine):
        with pytest.raises(QtoolError, match=r"is missing|holds no"):
            read(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, r"schema_version: Input should be 1 \(got 2\)"),
        ({"block_size": 0}, "block_size: Input should be greater than 0"),
        ({"kv_cache": "u3"}, "kv_cache: .*got 'u3'"),
        ({"hidden_states": {"size": 96, "layers": [3]}}, "hidden_states names layer 3 of 3"),
        ({"target": "onnx"}, r"holds no \*\.onnx, which an engine for onnx has"),
    ],
)
def test_an_engine_json_that_cannot_be_true_is_refused(
    changes: dict[str, object], message: str, tiny: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    compile_engine(tiny, "reference", engine)
    said = json.loads((engine / "engine.json").read_text())
    (engine / "engine.json").write_text(json.dumps(said | changes))
    with pytest.raises(QtoolError, match=message):
        open_engine(engine)


def test_a_damaged_engine_json_is_an_error_that_names_the_field(tmp_path: Path) -> None:
    fields = dict.fromkeys(EngineSpec.model_fields, 1) | {"surprise": 2}
    (tmp_path / "engine.json").write_text(json.dumps(fields))
    with pytest.raises(QtoolError, match=r"engine\.json: target: .*compile the checkpoint again"):
        read_spec(tmp_path)
