"""Checkpoints that others quantized: the logits of transformers, on every backend that can run them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.compile.build import compile_engine
from qtool.core.checkpoint import Checkpoint
from qtool.errors import UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Floats
from tests.compile.checkpoints import edit_config, write_family
from tests.compile.peer_checkpoints import COMPRESSED, write_awq, write_compressed, write_gptq
from tests.compile.steps import difference, in_chunks
from tests.compile.test_reference import TOKENS, transformers_logits

BOUND = 1e-4
"""All run in float32; what is left is the order of the sums."""
ROUNDED = 0.5
"""Of the distance to the dense model. Where a sum lies between two codes, its last bit decides which one the
input of the next linear becomes, and all that follows: the reference moves by up to 0.41 where its embeddings
and norms are moved by 3e-7, and by 0.65 or more where inputs are not rounded at all."""
TIED = {"int8 dynamic": 0.7, "int4 int8 dynamic": 0.12}
"""The same where most tokens have such a sum: compressed-tensors puts the largest input of a token at 127.5,
between two codes. OpenVINO is 0.52 and 0.10 away; inputs that are not rounded at all, 0.93 and 0.135."""
GPTQ = {
    "v1": {},
    "v2": {"version": "gptq_v2"},
    "symmetric": {"symmetric": True, "order": "plain"},
    "activation order": {"order": "activation", "symmetric": True},
    "activation order v2 asymmetric": {"order": "activation", "version": "gptq_v2"},
    "activation order apart": {"order": "apart"},
    "activation order without groups": {"order": "activation", "group_size": -1},
    "short last groups": {"order": "activation", "group_size": 64},
    "8 bits": {"bits": 8, "group_size": 32},
    "3 bits": {"bits": 3, "order": "activation"},
    "2 bits": {"bits": 2},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("llama", tmp_path_factory.mktemp("dense") / "model")


def logits(folder: Path) -> Floats:
    engine = open_engine(folder, kv_cache_tokens=320, threads=1)
    return in_chunks(engine, TOKENS, [4, 9, 1], [40, 37])


def assert_same(found: Floats, wanted: Floats, dense: Floats, name: str) -> None:
    rounds = COMPRESSED[name][2] is not None
    distance = difference(dense, wanted)
    assert distance > 0.05
    assert difference(found, wanted) < (TIED.get(name, ROUNDED) * distance if rounds else BOUND)
    if rounds and "int8 dynamic" not in name:
        rows = np.abs(found - wanted).max(1) / np.abs(wanted).max()
        assert np.median(rows) < 0.05 * distance


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_has_the_logits_of_transformers(name: str, dense: Path, tmp_path: Path) -> None:
    folder = write_compressed(dense, tmp_path / "model", name)
    assert_same(logits(folder), transformers_logits(folder, TOKENS), logits(dense), name)


@pytest.mark.parametrize("target", ["openvino", "onnx"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_compiled_compressed_tensors_has_the_logits_of_the_reference(
    name: str, target: str, dense: Path, tmp_path: Path
) -> None:
    folder = write_compressed(dense, tmp_path / "model", name)
    compile_engine(folder, target, tmp_path / "engine")
    assert_same(logits(tmp_path / "engine"), logits(folder), logits(dense), name)


def assert_holds(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.schemes().keys() == weights.keys()
    for module, weight in weights.items():
        torch.testing.assert_close(checkpoint.linear(module).dense(), weight, rtol=0, atol=0)


def test_autoawq_is_read_exactly_and_compiles(dense: Path, tmp_path: Path) -> None:
    folder, weights = write_awq(dense, tmp_path / "model")
    assert_holds(folder, weights)
    for target in ("openvino", "onnx"):
        compile_engine(folder, target, tmp_path / target)
        assert difference(logits(tmp_path / target), logits(folder)) < BOUND


@pytest.mark.parametrize("options", GPTQ.values(), ids=GPTQ)
def test_gptq_is_read_exactly(options: dict[str, object], dense: Path, tmp_path: Path) -> None:
    assert_holds(*write_gptq(dense, tmp_path / "model", **options))


@pytest.mark.parametrize(
    "name",
    ["v1", "activation order", "activation order apart", "short last groups", "8 bits", "3 bits", "2 bits"],
)
@pytest.mark.parametrize("target", ["openvino", "onnx"])
def test_gptq_compiles(target: str, name: str, dense: Path, tmp_path: Path) -> None:
    folder, _ = write_gptq(dense, tmp_path / "model", **GPTQ[name])
    compile_engine(folder, target, tmp_path / "engine")
    assert difference(logits(tmp_path / "engine"), logits(folder)) < BOUND


def test_compressed_tensors_with_g_idx_is_read_exactly(dense: Path, tmp_path: Path) -> None:
    name = "int4 int8 dynamic"
    folder = write_compressed(dense, tmp_path / "model", name)
    module = "model.layers.1.mlp.up_proj"
    before = Checkpoint(folder).linear(module).dense()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    tensors = load_file(folder / "model.safetensors")
    for stored in [key for key in tensors if key.endswith("weight_packed")]:
        in_features = int(tensors[stored.replace("packed", "shape")][1])
        tensors[stored.replace("packed", "g_idx")] = (torch.arange(in_features) // 32).int()
    tensors[f"{module}.weight_g_idx"] = (torch.arange(96) // 32)[order].int()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    edit_config(folder, quantization_config=config)
    linear = Checkpoint(folder).linear(module)
    assert linear.order is not None
    # the codes of every input stay, their group is another one
    codes, scale = before.view(160, 3, 32), Checkpoint(folder).tensor(f"{module}.weight_scale")
    codes = (codes / scale[..., None]).view(160, 96)
    torch.testing.assert_close(linear.dense(), codes * scale[:, (torch.arange(96) // 32)[order]])


def test_what_a_target_cannot_execute_is_refused_before_any_work(dense: Path, tmp_path: Path) -> None:
    folder = write_compressed(dense, tmp_path / "model", "int4 int8 dynamic")
    with pytest.raises(
        UsageError,
        match=r"down_proj is quantized as int4 symmetric, group 32; int8 per token activations, which target "
        r"tensorrt-rtx does not execute; it multiplies rounded inputs by weights of their own kind alone",
    ):
        compile_engine(folder, "tensorrt-rtx", tmp_path / "engine")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
