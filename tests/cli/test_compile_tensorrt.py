"""`qtool compile` for TensorRT: options, recipes and refusals."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Qtool
from tests.compile.checkpoints import write_family
from tests.models import write_tokenizer

pytest.importorskip("tensorrt_rtx_bindings")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_family("llama", tmp_path_factory.mktemp("model") / "llama")
    write_tokenizer(folder)
    return folder


def test_options_and_a_recipe_s_target_decide_what_is_built(
    qtool: Qtool, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "quantization: {rules: [{targets: ['*.mlp.*']}]}\n"
        "compile: [{target: tensorrt-rtx, tensorrt: {draft_tokens: 2, max_num_seqs: 3, max_context: 100}}]\n"
    )
    output = tmp_path / "engine"
    chosen = ("--recipe", recipe, "--cc", "89,80", "--max-num-seqs", "2")
    ended = qtool("compile", checkpoint, "--target", "tensorrt-rtx", *chosen, "-o", output)
    assert (ended.code, ended.out) == (0, f"{output}\n"), ended.err
    info = json.loads((output / "engine_info.json").read_text())
    assert info["compute_capabilities"] == [80, 89]
    assert info["profiles"][1]["sizes"]["B"] == [1, 1, 2]
    assert info["profiles"][2]["sizes"]["S"] == [2, 3, 3]
    assert info["max_context"] == 100
    assert sorted(file.name for file in output.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "engine.json",
        "engine_info.json",
        "generation_config.json",
        "model.plan",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--target", "tensorrt-rtx", "--cc", "80,x"), "--cc is '80,x', wanted whole numbers"),
        (("--target", "tensorrt-rtx", "--cc", "80,90"), "compute capability 90 is not supported"),
        (("--target", "tensorrt-rtx", "--kv-cache", "u8"), "kv_cache 'u8' is not possible"),
        (("--target", "tensorrt-rtx", "--chunk", "0"), "chunk"),
        (("--target", "openvino", "--chunk", "5"), "openvino has no use for the options of TensorRT"),
        (("--target", "tensorrt-rtx", "--recipe", "awq4"), "not tensorrt-rtx; add it there"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    qtool: Qtool, checkpoint: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    ended = qtool("compile", checkpoint, *options, "-o", tmp_path / "engine")
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert not list(tmp_path.glob("*engine*"))


def test_a_plugin_and_a_run_of_its_graph_on_the_cpu_exclude_each_other(
    qtool: Qtool, checkpoint: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "quantization: {rules: [{targets: ['*.mlp.*']}]}\n"
        "compile: [{target: tensorrt, tensorrt: {attention: plugin}}]\n"
    )
    chosen = ("--target", "tensorrt", "--recipe", recipe, "--verify")
    ended = qtool("compile", checkpoint, *chosen, "-o", tmp_path / "engine")
    assert (ended.code, ended.out) == (2, "")
    assert "--verify runs the graph on this CPU" in ended.err
