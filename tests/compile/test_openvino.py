"""OpenVINO engines against the reference engine on the same stored numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
import pytest
import torch
from transformers import LlamaConfig

from qtool.compile.build import compile_engine
from qtool.compile.engine import read_spec
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import QuantizedTensor
from qtool.core.recipe import OpenVinoOptions
from qtool.core.schemes import IntScheme
from qtool.errors import UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine
from qtool.runtime.engines.openvino import MODEL, compile_model
from tests.compile.checkpoints import (
    FAMILIES,
    SHAPE,
    round_to,
    write_family,
    write_model,
    write_quantized,
)
from tests.compile.steps import Chunk, difference, in_chunks, step_of

TOKENS = np.random.default_rng(1).integers(0, 101, 150).tolist()
BOUND = 1e-4
"""Both run in float32; what is left is the order of the sums."""
POOL = 640
SCHEMES = [
    IntScheme(bits, group_size, symmetric)
    for bits in (4, 8)
    for group_size in (32, None)
    for symmetric in (True, False)
]
Compiler = Callable[..., Engine]


@pytest.fixture
def compiled(tmp_path: Path) -> Compiler:
    def build(checkpoint: Path, kv_cache: str = "f32") -> Engine:
        folder = tmp_path / f"engine-{kv_cache}"
        compile_engine(checkpoint, "openvino", folder, kv_cache=kv_cache)
        return open_engine(folder, kv_cache_tokens=POOL, threads=1)

    return build


def assert_same(engine: Engine, reference: Engine, bound: float = BOUND) -> None:
    """The same logits at once, in chunks, token by token over a block's edge, and in a mixed batch."""
    table = [7, 2, 11, 5, 13]
    wanted = in_chunks(reference, TOKENS, table, [150])
    for sizes in ([150], [33, 64, 53], [126, 1]):
        assert difference(in_chunks(engine, TOKENS, table, sizes), wanted) < bound
    before = step_of(Chunk(TOKENS[:140], 0, table), Chunk(TOKENS[:20], 0, [3, 9]))
    after = step_of(
        Chunk(TOKENS[140:141], 140, table), Chunk(TOKENS[20:60], 20, [3, 9]), Chunk(TOKENS[:3], 0, [1])
    )
    for step in (before, after):
        logits = engine.run(step)
        assert difference(logits, reference.run(step)) < bound
    assert difference(logits, np.concatenate([wanted[140:141], wanted[20:60], wanted[:3]])) < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_the_reference(
    family: str, compiled: Compiler, tmp_path: Path
) -> None:
    checkpoint = write_family(family, tmp_path / "model")
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_weights_are_kept_exactly_and_at_16_bits(
    dtype: torch.dtype, compiled: Compiler, tmp_path: Path
) -> None:
    checkpoint = write_family("llama-bias", tmp_path / "model", dtype)
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))
    kinds = matrix_products(tmp_path / "engine-f32")
    assert kinds == ["f16" if dtype == torch.float16 else "bf16"] * len(kinds)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_weights_have_the_logits_of_the_reference(
    scheme: IntScheme, compiled: Compiler, tmp_path: Path
) -> None:
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": scheme})
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_linears_of_several_schemes_side_by_side_are_not_mixed_up(
    scale_dtype: torch.dtype, compiled: Compiler, tmp_path: Path
) -> None:
    schemes = {
        "q_proj": IntScheme(8, None, True),
        "v_proj": IntScheme(4, 48, False),
        "gate_proj": IntScheme(4, 96, True),
        "up_proj": IntScheme(4, 32, True),
        "down_proj": IntScheme(4, 160, False),
    }
    source = write_family("qwen2", tmp_path / "source", scale_dtype)
    checkpoint = write_quantized(source, tmp_path / "model", schemes, scale_dtype)
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group_size", [48, 20, 6])
def test_a_group_size_that_the_plugin_gets_wrong_is_split_exactly(
    num_bits: int, group_size: int, compiled: Compiler, tmp_path: Path
) -> None:
    """Found with OpenVINO 2026.4.1: steps of one to four tokens had another group's scales."""
    sizes = {"hidden_size": 4 * group_size, "intermediate_size": 3 * group_size}
    config = LlamaConfig(**{**SHAPE, **sizes, "num_attention_heads": 2, "num_key_value_heads": 1})
    source = write_model(config, tmp_path / "source")
    scheme = IntScheme(num_bits, group_size, symmetric=False)
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": scheme})
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


def kernels(folder: Path) -> dict[ov.Node, str]:
    """The kind of each node of the compiled graph."""
    graph = compile_model(folder / MODEL, read_spec(folder), 1).get_runtime_model()
    return {node: node.get_rt_info()["layerType"].astype(str) for node in graph.get_ops()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotary_embedding_is_one_kernel(family: str, tmp_path: Path) -> None:
    checkpoint = write_family(family, tmp_path / "model")
    compile_engine(checkpoint, "openvino", tmp_path / "engine")
    kinds = list(kernels(tmp_path / "engine").values())
    assert kinds.count("RoPE") == 2 * kinds.count("PagedAttention") > 0


def matrix_products(folder: Path) -> list[str]:
    """The type of the stored weight that each matrix product of the compiled graph reads."""
    kinds = kernels(folder)
    assert "MatMul" not in kinds.values()
    return [
        node.input(1).get_element_type().get_type_name()
        for node, kind in kinds.items()
        if kind == "FullyConnected"
    ]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_weights_are_decompressed_inside_the_matrix_product(
    scheme: IntScheme, tmp_path: Path
) -> None:
    source = write_family("llama", tmp_path / "source", torch.float16)
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": scheme})
    compile_engine(checkpoint, "openvino", tmp_path / "engine")
    kind = f"{'i' if scheme.symmetric else 'u'}{scheme.num_bits}"
    layer = ["f16", "f16", kind, kind]
    assert sorted(matrix_products(tmp_path / "engine")) == sorted([*layer * 3, "f16"])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_packed_codes_come_back_as_they_were(scheme: IntScheme, tmp_path: Path) -> None:
    source = write_family("llama", tmp_path / "source")
    checkpoint = Checkpoint(write_quantized(source, tmp_path / "model", {"mlp": scheme}))
    module = "model.layers.2.mlp.down_proj"
    read = checkpoint.linear(module).weight
    wanted = round_to(Checkpoint(source).tensor(f"{module}.weight"), scheme, torch.float32)
    assert isinstance(read, QuantizedTensor)
    assert torch.equal(read.codes, wanted.codes)
    assert torch.equal(read.dequantize(), wanted.dequantize())


@pytest.mark.parametrize(("kv_cache", "bound"), [("f16", 5e-3), ("u8", 0.1)])
def test_a_rounded_pool_is_an_option_that_costs_a_little(
    kv_cache: str, bound: float, compiled: Compiler, tmp_path: Path
) -> None:
    """f16 keeps 11 bits of a key or value, u8 has 8 for the range of a key's feature or of a value."""
    checkpoint = write_family("llama", tmp_path / "model")
    engine = compiled(checkpoint, kv_cache)
    logits = in_chunks(engine, TOKENS, [7, 2, 11, 5, 13], [33])
    wanted = in_chunks(open_engine(checkpoint, kv_cache_tokens=POOL), TOKENS, [7, 2, 11, 5, 13], [33])
    assert BOUND < difference(logits, wanted) < bound


def test_inputs_rounded_to_int8_are_an_option_that_costs_a_little(tmp_path: Path) -> None:
    """127 steps of each group's largest input; on a CPU without VNNI the kernels round nothing."""
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": IntScheme(4, 32, True)})
    spec = compile_engine(
        checkpoint, "openvino", tmp_path / "engine", openvino=OpenVinoOptions(dynamic_quantization=32)
    )
    assert spec.openvino == OpenVinoOptions(dynamic_quantization=32)
    engine = open_engine(tmp_path / "engine", kv_cache_tokens=POOL, threads=1)
    logits = in_chunks(engine, TOKENS, [7, 2, 11, 5, 13], [33])
    wanted = in_chunks(open_engine(checkpoint, kv_cache_tokens=POOL), TOKENS, [7, 2, 11, 5, 13], [33])
    rounded = difference(logits, wanted)
    assert rounded < 0.05
    assert (rounded > BOUND) == ("vnni" in Path("/proc/cpuinfo").read_text())


@pytest.mark.parametrize("kv_cache", [None, "u8"])
def test_computing_in_bf16_is_an_option_that_costs_a_little(kv_cache: str | None, tmp_path: Path) -> None:
    """8 bits of each number, but for angles of the rotary embedding: positions in bf16 would be others."""
    checkpoint = write_family("llama", tmp_path / "model")
    options = OpenVinoOptions(precision="bf16")
    spec = compile_engine(checkpoint, "openvino", tmp_path / "engine", kv_cache=kv_cache, openvino=options)
    assert spec.kv_cache == (kv_cache or "bf16")
    engine = open_engine(tmp_path / "engine", kv_cache_tokens=POOL, threads=1)
    wanted = in_chunks(open_engine(checkpoint, kv_cache_tokens=POOL), TOKENS, [7, 2, 11, 5, 13], [33])
    logits = in_chunks(engine, TOKENS, [7, 2, 11, 5, 13], [33])
    assert BOUND < difference(logits, wanted) < 0.1


@pytest.mark.parametrize(("precision", "kv_cache"), [("bf16", "f16"), ("bf16", "f32"), ("f32", "bf16")])
def test_a_pool_that_the_precision_has_not_is_refused(
    precision: Literal["f32", "bf16"], kv_cache: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=f"'{kv_cache}' is not possible for .* in precision {precision}; wanted"
    ):
        compile_engine(
            tiny,
            "openvino",
            tmp_path / "engine",
            kv_cache=kv_cache,
            openvino=OpenVinoOptions(precision=precision),
        )


def test_groups_of_inputs_that_would_not_be_rounded_are_refused(tmp_path: Path) -> None:
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": IntScheme(4, 32, True)})
    with pytest.raises(UsageError, match=r"is 64, which does not divide the group size 32 of model\.layers"):
        compile_engine(
            checkpoint, "openvino", tmp_path / "engine", openvino=OpenVinoOptions(dynamic_quantization=64)
        )
    with pytest.raises(
        UsageError, match="dynamic_quantization is 32, but no linear is quantized to integers"
    ):
        compile_engine(
            source, "openvino", tmp_path / "engine", openvino=OpenVinoOptions(dynamic_quantization=32)
        )
    with pytest.raises(UsageError, match="onnx has no use for the options of OpenVINO"):
        compile_engine(
            checkpoint, "onnx", tmp_path / "engine", openvino=OpenVinoOptions(dynamic_quantization=32)
        )


@pytest.mark.parametrize(
    ("kv_cache", "precision"),
    [("f32", "f32"), ("f16", "f32"), ("u8", "f32"), ("bf16", "bf16"), ("u8", "bf16")],
)
def test_the_pool_has_the_bytes_that_the_spec_says(
    kv_cache: str, precision: Literal["f32", "bf16"], tiny: Path, tmp_path: Path
) -> None:
    options = OpenVinoOptions(precision=precision)
    spec = compile_engine(tiny, "openvino", tmp_path / "engine", kv_cache=kv_cache, openvino=options)
    pools = [
        port
        for port in compile_model(tmp_path / "engine" / MODEL, spec, 1).inputs
        if "_cache." in port.any_name
    ]
    block_bytes = sum(
        port.element_type.size * np.prod([length.get_length() for length in list(port.partial_shape)[1:]])
        for port in pools
    )
    assert len(pools) == 2 * spec.num_layers
    assert block_bytes == spec.block_size * spec.kv_bytes_per_token


def test_nothing_is_rounded_unless_asked_for(tiny: Path, tmp_path: Path) -> None:
    spec = compile_engine(tiny, "openvino", tmp_path / "engine")
    model = compile_model(tmp_path / "engine" / MODEL, spec, 1)
    assert model.get_property("INFERENCE_PRECISION_HINT") == ov.Type.f32
    assert model.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    assert model.get_property("KV_CACHE_PRECISION") == ov.Type.f32
