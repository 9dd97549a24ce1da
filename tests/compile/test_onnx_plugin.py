"""The graph with attention as a plugin: its contract, its numbers through the driver, and what refuses it."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx
import pytest
import torch

from qtool.compile.backends.onnx import Onnx, write_onnx
from qtool.compile.backends.onnx_graph import Graph
from qtool.compile.backends.onnx_plugin import PluginOnnx
from qtool.compile.backends.tensorrt.checks import read_graph
from qtool.compile.backends.tensorrt.plugins import plugin_operations
from qtool.compile.backends.tensorrt.zero_points import fold_zero_points
from qtool.compile.build import compile_engine
from qtool.compile.config import read_config
from qtool.compile.kernels.tensorrt_plugin import ATTRIBUTES, INPUTS, MERGED
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import CompileTarget, TensorRtOptions
from qtool.core.schemes import IntScheme
from qtool.errors import QtoolError, UsageError
from tests.compile.checkpoints import write_family, write_quantized
from tests.compile.two_layers import write_two_layers

ROOT = Path(__file__).parents[2]
PLUGIN_ON_90 = partial(PluginOnnx, compute_capability=90)
PLUGIN = TensorRtOptions(attention="plugin")
OWN = {"plugin_namespace", "aot"}
"""Attributes for TensorRT's parser."""


def write_graph(
    checkpoint: Path, folder: Path, make: Callable[[Graph, torch.dtype, int], Onnx] = PLUGIN_ON_90
) -> Path:
    folder.mkdir()
    config = read_config(Checkpoint(checkpoint).config, "config.json")
    weights = CheckpointWeights(config, Checkpoint(checkpoint))
    return write_onnx(config, weights, folder, dtype=torch.float16, make=make)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sliding window in two of three layers, so two masks; asymmetric weights."""
    folder = tmp_path_factory.mktemp("plugin")
    return write_quantized(
        write_family("qwen2-window", folder / "dense"), folder / "model", {"mlp": IntScheme(4, 32, False)}
    )


def test_it_takes_and_gives_what_the_native_graph_does(windows: Path, tmp_path: Path) -> None:
    plugin, native = (
        onnx.load(write_graph(windows, tmp_path / name, **chosen), load_external_data=False).graph
        for name, chosen in (("plugin", {}), ("native", {"make": Onnx}))
    )
    for of_plugin, of_native in ((plugin.input, native.input), (plugin.output, native.output)):
        found, wanted = ({value.name: value for value in values} for values in (of_plugin, of_native))
        assert found == wanted
    assert "attention_mask.40" in {value.name for value in plugin.input}
    operators = {node.op_type for node in plugin.node}
    assert not {"Concat", "Attention"} & operators, "nothing of the past is copied"


def test_its_nodes_have_the_inputs_and_attributes_that_the_plugins_declare(
    windows: Path, tmp_path: Path
) -> None:
    nodes = [
        node
        for node in onnx.load(write_graph(windows, tmp_path / "graph")).graph.node
        if node.domain == "qtool"
    ]
    assert [node.op_type for node in nodes] == ["attend", "merge"] * 3
    kinds = {onnx.AttributeProto.INT: int, onnx.AttributeProto.FLOAT: float}
    for node in nodes:
        found = {each.name: kinds[each.type] for each in node.attribute if each.name not in OWN}
        assert found == ATTRIBUTES
        assert len(node.input) == {"attend": len(INPUTS), "merge": len(MERGED)}[node.op_type]


CASES = {
    # numbers of 11 bits through 2 layers of SmolLM2, and through 3 of random weights
    "smollm2": 0.003,
    "windows": 0.03,
}


@pytest.mark.parametrize("name", CASES)
def test_the_driver_over_it_has_the_logits_of_the_reference(
    name: str, smollm2: Path, windows: Path, tmp_path: Path
) -> None:
    """Prompts in chunks, decoding, a tree of drafts and what follows its accepted path, in every profile."""
    checkpoint = windows if name == "windows" else write_two_layers(smollm2, tmp_path / "model", {})
    fold_zero_points(write_graph(checkpoint, tmp_path / "graph"))
    compile_engine(checkpoint, "reference", tmp_path / "reference")
    folders = [checkpoint, tmp_path / "graph", tmp_path / "reference"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.plugin_interpreter", *folders],
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    told = json.loads(done.stdout)
    assert len(told["far"]) == 4
    assert max(told["far"]) < CASES[name]
    assert told["profiles"] == [0, 1, 2]


def test_without_plugins_its_nodes_are_refused_by_name(windows: Path, tmp_path: Path) -> None:
    model = write_graph(windows, tmp_path / "graph")
    fold_zero_points(model)
    with pytest.raises(QtoolError, match=r"node attend_\d+ \(qtool\.attend\) is a plugin's"):
        read_graph(model)
    assert read_graph(model, plugins=True).inputs["attention_mask"] == ("B", 1, "S", "P+S")


def test_only_tensorrt_proper_takes_the_option(windows: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="target tensorrt-rtx has no plugins"):
        compile_engine(windows, "tensorrt-rtx", tmp_path / "engine", tensorrt=PLUGIN)
    with pytest.raises(ValueError, match="attention plugin has no use for target tensorrt-rtx"):
        CompileTarget(target="tensorrt-rtx", tensorrt=PLUGIN)
    assert CompileTarget(target="tensorrt", tensorrt=PLUGIN).tensorrt == PLUGIN


def test_a_gpu_without_a_kernel_is_refused_before_any_work(
    windows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(Checkpoint(windows).config, "config.json")
    for capability, known in (((8, 6), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        if known:
            plugin_operations(config)
        else:
            with pytest.raises(UsageError, match=r"no kernel for compute capability 86.*80, 89, 90, 100"):
                plugin_operations(config)
