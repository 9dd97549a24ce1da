"""What is done to a graph, and looked for in it, before a builder sees it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from qtool.compile.backends.onnx import write_onnx
from qtool.compile.backends.onnx_tensorrt import TensorRtOnnx
from qtool.compile.backends.tensorrt.checks import read_graph
from qtool.compile.backends.tensorrt.weights import SplitChannels, SymmetricWeights
from qtool.compile.backends.tensorrt.zero_points import fold_zero_points
from qtool.compile.build import compile_engine
from qtool.compile.config import read_config
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.schemes import Fp8Scheme, IntScheme, LinearScheme
from qtool.errors import QtoolError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.onnx import MODEL, OnnxEngine
from tests.compile.checkpoints import write_family, write_quantized
from tests.compile.linears import GROUPS, NVFP4, Requantized
from tests.compile.steps import difference, in_chunks

TOKENS = np.random.default_rng(5).integers(0, 101, 40).tolist()
SCHEMES = [IntScheme(bits, group_size, False) for bits in (4, 8) for group_size in (32, None)]
BOUND = 1e-4
"""In float32 the correction costs an order of sums, no more."""


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_folding_zero_points_changes_no_logit(scheme: IntScheme, tmp_path: Path) -> None:
    """An untied quantized head too, whose input has lost the dimension of sequences."""
    source = write_family("llama-bias", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"proj": scheme})
    spec = compile_engine(checkpoint, "onnx", tmp_path / "engine")
    file = tmp_path / "engine" / MODEL
    before = in_chunks(OnnxEngine(file, spec, kv_cache_tokens=64), TOKENS, [1, 0], [23, 17])
    assert fold_zero_points(file) == 4 * 3  # qkv and gate_up are one each
    onnx.checker.check_model(file, full_check=True)
    after = in_chunks(OnnxEngine(file, spec, kv_cache_tokens=64), TOKENS, [1, 0], [23, 17])
    assert 0 < difference(after, before) < BOUND
    graph = onnx.load(file, load_external_data=False).graph
    kinds = {tensor.data_type for tensor in graph.initializer}
    assert not kinds & {TensorProto.UINT4, TensorProto.UINT8}
    assert fold_zero_points(file) == 0


def test_folding_costs_two_bytes_a_group_and_channel(tmp_path: Path) -> None:
    source = write_family("llama", tmp_path / "source")
    sizes = {}
    for symmetric in (True, False):
        scheme = IntScheme(4, 32, symmetric)
        checkpoint = write_quantized(source, tmp_path / f"model{symmetric}", {"mlp": scheme})
        config = read_config(Checkpoint(checkpoint).config, "config.json")
        folder = tmp_path / f"onnx{symmetric}"
        folder.mkdir()
        file = write_onnx(
            config, CheckpointWeights(config, Checkpoint(checkpoint)), folder, dtype=torch.float16
        )
        fold_zero_points(file)
        sizes[symmetric] = read_graph(file)
    weights = 3 * 3 * 96 * 160
    assert sizes[False].int4_codes == sizes[True].int4_codes == weights
    assert sizes[False].int4_blocks == {32}
    extra = sizes[False].weight_bytes - sizes[True].weight_bytes
    assert extra - weights // 32 * 2 in range(1000)  # a few shapes besides


def test_rounding_again_without_zero_points_reports_what_it_adds(tmp_path: Path) -> None:
    scheme = IntScheme(4, 32, False)
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"up_proj": scheme})
    config = read_config(Checkpoint(checkpoint).config, "config.json")
    errors: dict[str, float] = {}
    weights = SymmetricWeights(CheckpointWeights(config, Checkpoint(checkpoint)), errors)
    file = write_onnx(config, weights, tmp_path)
    assert fold_zero_points(file) == 0
    read_graph(file)
    assert set(errors) == {f"model.layers.{layer}.mlp.up_proj" for layer in range(3)}
    assert all(12 < decibel < 30 for decibel in errors.values())  # 4 bits of a normal weight: about 20


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_channel_of_one_scale_becomes_two_groups_of_the_same_numbers(
    symmetric: bool, tmp_path: Path
) -> None:
    source = write_family("llama", tmp_path / "source")
    schemes = {"up_proj": IntScheme(4, None, symmetric), "down_proj": IntScheme(8, None, symmetric)}
    checkpoint = write_quantized(source, tmp_path / "model", schemes)
    config = read_config(Checkpoint(checkpoint).config, "config.json")
    plain = CheckpointWeights(config, Checkpoint(checkpoint))
    split = SplitChannels(plain)
    for module, groups in (("up_proj", 2), ("down_proj", 1), ("gate_proj", None)):
        name = f"model.layers.1.mlp.{module}"
        assert torch.equal(split.linear(name).dense(), plain.linear(name).dense())
        weight = split.linear(name).weight
        assert groups is None or weight.scale.shape[1] == groups


@pytest.mark.parametrize("projections", [LinearScheme(Fp8Scheme(128, 32), GROUPS["fp8"]), NVFP4], ids=str)
def test_zero_points_are_folded_behind_products_of_codes_too(
    projections: LinearScheme, tmp_path: Path
) -> None:
    """Shapes have to be known behind operators that say theirs only when they run."""
    checkpoint = Checkpoint(write_family("llama", tmp_path / "source"))
    config = read_config(checkpoint.config, "config.json")
    schemes = {"self_attn": projections, "mlp": LinearScheme(IntScheme(4, 32, False))}
    weights = Requantized(CheckpointWeights(config, checkpoint), schemes)
    file = write_onnx(config, weights, tmp_path, dtype=torch.float16, make=TensorRtOnnx)
    assert fold_zero_points(file) == 2 * 3
    kind = "FP8" if projections != NVFP4 else "FP4E2M1"
    attention = 96 * 32 * (6 + 2 + 2 + 6)
    assert read_graph(file).multiplied_codes == {kind: 3 * attention}


def graph_of(
    folder: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], domain: str = ""
) -> Path:
    """A graph from x [T, 64] to y, with the int4 weight w [64, 96] in blocks of 32."""
    codes = helper.make_tensor("w", TensorProto.INT4, [64, 96], bytes(64 * 96 // 2), raw=True)
    tensors = [codes, *(numpy_helper.from_array(value, name) for name, value in weights.items())]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["T", None]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=tensors)
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), folder / "g.onnx")
    return folder / "g.onnx"


SCALE = {"s": np.ones((2, 96), np.float16)}
EIGHT_BIT = {"a": np.array(0.05, np.float16), "z": np.array(0, np.int8)}


def test_4_bit_weights_under_8_bit_activations_are_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "a", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "a", "z"], ["xd"]),
        helper.make_node("Identity", ["xd"], ["xi"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], axis=0, block_size=32),
        helper.make_node("MatMul", ["xi", "wd"], ["y"], name="product"),
    ]
    with pytest.raises(QtoolError, match=r"product multiplies weights in groups or .*only the first group's"):
        read_graph(graph_of(tmp_path, nodes, SCALE | EIGHT_BIT))
    alone = [nodes[3], helper.make_node("MatMul", ["x", "wd"], ["y"])]
    assert read_graph(graph_of(tmp_path, alone, SCALE)).int4_blocks == {32}


def test_a_plugin_s_node_is_refused_by_name(tmp_path: Path) -> None:
    nodes = [helper.make_node("PagedAttention", ["x"], ["y"], name="attend", domain="qtool")]
    with pytest.raises(QtoolError, match=r"node attend \(qtool\.PagedAttention\) is a plugin's"):
        read_graph(graph_of(tmp_path, nodes, {}, domain="qtool"))


def test_zero_points_that_were_left_are_refused(tmp_path: Path) -> None:
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": IntScheme(4, 32, False)})
    compile_engine(checkpoint, "onnx", tmp_path / "engine")
    with pytest.raises(QtoolError, match=r"codes_\d+ has zero points, which TensorRT's int4"):
        read_graph(tmp_path / "engine" / MODEL)


def test_a_real_engine_of_the_reference_agrees_after_folding(tmp_path: Path) -> None:
    """End to end against the reference, not only against the graph before."""
    source = write_family("qwen3", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": IntScheme(4, 32, False)})
    spec = compile_engine(checkpoint, "onnx", tmp_path / "engine")
    fold_zero_points(tmp_path / "engine" / MODEL)
    folded = OnnxEngine(tmp_path / "engine" / MODEL, spec, kv_cache_tokens=64)
    reference = open_engine(checkpoint, kv_cache_tokens=64)
    wanted = in_chunks(reference, TOKENS, [1, 0], [40])
    assert difference(in_chunks(folded, TOKENS, [1, 0], [25, 15]), wanted) < BOUND
