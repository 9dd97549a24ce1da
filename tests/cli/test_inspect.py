import json
from pathlib import Path

import pytest

from qtool.compile.backends.tensorrt.info import read_info
from qtool.compile.build import compile_engine
from qtool.core.recipe import TensorRtOptions
from tests.cli.conftest import Qtool
from tests.compile.checkpoints import write_family


def test_inspect_prints_tables(tiny: Path, qtool: Qtool) -> None:
    ended = qtool("inspect", tiny, "--bandwidth", "100", "--flops", "2")
    assert ended.code == 0
    for text in (
        "LlamaForCausalLM, 3 layers",
        "layers.*.mlp.down_proj",
        "embeddings",
        "decode, 1 x 1024",
        "memory",
    ):
        assert text in ended.out


def test_what_is_piped_is_as_wide_as_it_needs(
    tiny: Path, qtool: Qtool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ended = qtool("inspect", tiny, "--bandwidth", "100")
    (row,) = (line for line in ended.out.splitlines() if "layers.*.mlp.down_proj" in line)
    assert all(text in row for text in ("96 x 160", "F32", "MB"))
    assert max(map(len, ended.out.splitlines())) > 80


def test_inspect_prints_json(tiny: Path, qtool: Qtool) -> None:
    ended = qtool("inspect", tiny, "--json", "--bandwidth", "100", "--batch", "3", "--kv-cache", "u8")
    report = json.loads(ended.out)
    assert report["machine"] == {"bandwidth": 100e9, "flops": None, "measured": False}
    assert report["steps"]["decode, 3 x 1024"]["tokens"] == 3
    assert report["steps"]["prefill, 3 x 512"]["bound"] is None
    assert sum(report["parts"].values()) == report["weight_bytes"]


def test_inspect_says_what_calls_a_tensorrt_engine_serves(
    qtool: Qtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    monkeypatch.setenv("COLUMNS", "200")  # a line a row
    options = TensorRtOptions(
        compute_capabilities=(86, 120), max_num_seqs=6, chunk=48, max_context=200, draft_tokens=3
    )
    checkpoint = write_family("llama", tmp_path / "model")
    compile_engine(checkpoint, "tensorrt-rtx", tmp_path / "engine", tensorrt=options)
    ended = qtool("inspect", tmp_path / "engine", "--bandwidth", "100")
    assert ended.code == 0, ended.err
    words = " ".join(ended.out.replace("│", " ").split())
    for text in (
        "engine for tensorrt-rtx",
        "compute capabilities 8.6, 12.0",
        "longest context 200 tokens",
        "KV cache, f16 768 bytes a token",
        "prefill B 1/1/2, S 1/48/48, M 1/3/7, R 1/1/48",
        "decode B 1/3/6, S 1/1/1, M 1/3/7, R 1/3/6",
        "verify B 1/3/6, S 2/4/4, M 1/3/7, R 1/12/24",
    ):
        assert text in words
    report = json.loads(qtool("inspect", tmp_path / "engine", "--json", "--bandwidth", "100").out)
    assert report["compute_capabilities"] == [86, 120]
    assert [profile["kind"] for profile in report["profiles"]] == ["prefill", "decode", "verify"]
    assert report["profiles"][2]["sizes"]["P+S"] == [34, 100, 228]
    assert all(profile["activation_bytes"] > 0 for profile in report["profiles"])
    unknown = json.loads(qtool("inspect", tmp_path / "engine", "--json").out)
    assert unknown["machine"] is None  # this CPU's memory says nothing of a GPU
    assert {step["time"] for step in unknown["steps"].values()} == {None}
    assert "give --bandwidth" in qtool("inspect", tmp_path / "engine").out
    info = read_info(tmp_path / "engine")
    assert (report["weight_bytes"], report["max_context"]) == (info.weight_bytes, 200)


def test_inspect_refuses_what_makes_no_sense(tiny: Path, qtool: Qtool) -> None:
    ended = qtool("inspect", tiny, "--flops", "2")
    assert (ended.code, ended.out) == (2, "")
    assert "give --bandwidth too" in ended.err
    ended = qtool("inspect", tiny, "--bandwidth", "inf", "--flops", "inf")
    assert (ended.code, ended.out) == (2, "")
    assert "--bandwidth is inf, wanted a finite number" in ended.err
    ended = qtool("inspect", tiny, "--kv-cache", "u9", "--bandwidth", "1")
    assert ended.code == 2
    assert "--kv-cache 'u9' is unknown; known: bf16, f16, f32, u8" in ended.err
