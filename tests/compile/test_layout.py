"""Linears that a checkpoint stores in its own way."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.compile.build import compile_engine
from qtool.compile.config import read_config
from qtool.compile.layout import cut
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import Fp8Tensor, Linear, QuantizedTensor
from qtool.core.schemes import Fp8Scheme, IntScheme
from qtool.errors import QtoolError
from qtool.runtime.engines import open_engine
from tests.compile.checkpoints import edit_config, round_to, write_family, write_quantized
from tests.compile.steps import difference, in_chunks

WEIGHT = torch.randn(21, 32, generator=torch.Generator().manual_seed(0))
SCHEMES = {
    "qkv_proj": IntScheme(4, 48, False),
    "gate_up_proj": IntScheme(4, 32, True),
    "experts.0.w1": IntScheme(8, None, True),
    "experts.1.w": IntScheme(4, 32, True),
    "w3": IntScheme(4, 48, False),
    "experts.2": IntScheme(4, None, False),
    "experts": IntScheme(4, 16, True),
    "down_proj": IntScheme(8, None, False),
}


def fp8(rows: int | None, columns: int | None) -> Fp8Tensor:
    scheme = Fp8Scheme(rows, columns)
    scale = torch.rand(scheme.grid(*WEIGHT.shape), generator=torch.Generator().manual_seed(1)) + 0.5
    return Fp8Tensor(WEIGHT.to(torch.float8_e4m3fn), scale, scheme)


@pytest.mark.parametrize(
    "weight",
    [
        WEIGHT,
        round_to(WEIGHT, IntScheme(4, 16, False), torch.float32),
        round_to(WEIGHT, IntScheme(8, None, True), torch.float16),
        fp8(None, None),
        fp8(1, None),
        fp8(8, 16),
    ],
    ids=["dense", "int4", "int8", "fp8-tensor", "fp8-channel", "fp8-block"],
)
def test_some_rows_of_a_linear_are_the_same_numbers(weight: Tensor | QuantizedTensor | Fp8Tensor) -> None:
    whole = Linear(weight, torch.arange(21.0))
    part = cut(whole, range(5, 18))
    assert part.bias is not None
    assert torch.equal(part.dense(), whole.dense()[5:18])
    assert torch.equal(part.bias, torch.arange(5.0, 18.0))


@pytest.mark.parametrize("family", ["phi4-mini", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("target", ["openvino", "onnx"])
def test_quantized_parts_of_a_linear_and_experts_reach_every_engine(
    target: str, family: str, tmp_path: Path
) -> None:
    source = write_family(family, tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", SCHEMES)
    compile_engine(checkpoint, target, tmp_path / "engine")
    tokens, table = [*range(100), *range(50)], [7, 2, 11, 5, 13]
    wanted = in_chunks(open_engine(checkpoint, kv_cache_tokens=640), tokens, table, [150])
    engine = open_engine(tmp_path / "engine", kv_cache_tokens=640)
    assert difference(in_chunks(engine, tokens, table, [126, 1]), wanted) < 1e-4


def test_a_linear_that_is_stored_as_one_is_named_when_it_does_not_fit(tmp_path: Path) -> None:
    folder = edit_config(write_family("phi3", tmp_path / "model"), num_key_value_heads=3)
    checkpoint = Checkpoint(folder)
    weights = CheckpointWeights(read_config(checkpoint.config, "config.json"), checkpoint)
    with pytest.raises(QtoolError, match=r"self_attn.qkv_proj has shape \(160, 96\), config.json says \(192"):
        weights.linear("model.layers.0.self_attn.k_proj")
