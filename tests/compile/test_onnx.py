"""ONNX engines against the reference engine on the same stored numbers, and the graph's own contract."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto
from transformers import MixtralConfig

from qtool.compile.backends.onnx import DATA, MODEL, write_onnx
from qtool.compile.build import compile_engine
from qtool.compile.config import read_config
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.schemes import IntScheme
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import onnx as driver
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine
from qtool.runtime.engines.onnx import OnnxEngine
from tests.compile.checkpoints import FAMILIES, SHAPE, write_family, write_model, write_quantized
from tests.compile.steps import Chunk, difference, in_chunks, step_of

TOKENS = np.random.default_rng(1).integers(0, 101, 150).tolist()
TABLE = [7, 2, 11, 5, 13]
BOUND = 1e-4
"""Both run in float32; what is left is the order of the sums."""
POOL = 640
SCHEMES = [
    IntScheme(bits, group_size, symmetric)
    for bits in (4, 8)
    for group_size in (32, None)
    for symmetric in (True, False)
]
Compiler = Callable[[Path], Engine]


@pytest.fixture
def compiled(tmp_path: Path) -> Compiler:
    def build(checkpoint: Path) -> Engine:
        compile_engine(checkpoint, "onnx", tmp_path / "engine")
        return open_engine(tmp_path / "engine", kv_cache_tokens=POOL, threads=1)

    return build


def assert_same(engine: Engine, reference: Engine) -> None:
    """The same logits at once, in chunks, token by token over a block's edge, and in a mixed batch."""
    wanted = in_chunks(reference, TOKENS, TABLE, [150])
    for sizes in ([150], [33, 64, 53], [126, 1]):
        assert difference(in_chunks(engine, TOKENS, TABLE, sizes), wanted) < BOUND
    before = step_of(Chunk(TOKENS[:140], 0, TABLE), Chunk(TOKENS[:20], 0, [3, 9]))
    after = step_of(
        Chunk(TOKENS[140:141], 140, TABLE),
        Chunk(TOKENS[20:60], 20, [3, 9]),
        Chunk(TOKENS[:1], 0, [1]),
        Chunk(TOKENS[:3], 0, [0]),
        rows=[0, 3, 40, 41, 44],
    )
    for step in (before, after):
        logits = engine.run(step)
        assert difference(logits, reference.run(step)) < BOUND
    assert difference(logits, wanted[[140, 22, 59, 0, 2]]) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_the_reference(
    family: str, compiled: Compiler, tmp_path: Path
) -> None:
    checkpoint = write_family(family, tmp_path / "model")
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


def test_a_router_of_one_expert_is_a_matrix_of_one_row(compiled: Compiler, tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=1, num_experts_per_tok=1)
    checkpoint = write_model(config, tmp_path / "model")
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_weights_have_the_logits_of_the_reference(
    scheme: IntScheme, compiled: Compiler, tmp_path: Path
) -> None:
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": scheme})
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


def test_linears_of_several_schemes_side_by_side_are_not_mixed_up(compiled: Compiler, tmp_path: Path) -> None:
    schemes = {
        "q_proj": IntScheme(8, None, True),
        "v_proj": IntScheme(4, 48, False),
        "gate_proj": IntScheme(4, 96, True),
        "up_proj": IntScheme(4, 32, True),
        "down_proj": IntScheme(4, 160, False),
    }
    source = write_family("qwen2", tmp_path / "source", torch.bfloat16)
    checkpoint = write_quantized(source, tmp_path / "model", schemes, torch.bfloat16)
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


def test_linears_of_one_scheme_that_are_stacked_keep_their_biases(compiled: Compiler, tmp_path: Path) -> None:
    scheme = IntScheme(4, 32, False)
    source = write_family("llama-bias", tmp_path / "source", torch.float16)
    checkpoint = write_quantized(source, tmp_path / "model", {"proj": scheme}, torch.float16)
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_weights_are_kept_exactly_and_at_16_bits(
    dtype: torch.dtype, compiled: Compiler, tmp_path: Path
) -> None:
    checkpoint = write_family("llama-bias", tmp_path / "model", dtype)
    assert_same(compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert (tmp_path / "engine" / DATA).stat().st_size < stored + 200_000  # alignment


def test_4_bit_products_do_not_round_their_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, ONNX Runtime sums 4-bit products over inputs rounded to int8."""
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": IntScheme(4, 32, True)})
    compile_engine(checkpoint, "onnx", tmp_path / "engine")
    wanted = in_chunks(open_engine(checkpoint, kv_cache_tokens=POOL), TOKENS, TABLE, [150])
    ours = open_engine(tmp_path / "engine", kv_cache_tokens=POOL)
    monkeypatch.setattr(driver, "open_session", lambda model, threads: ort.InferenceSession(model))
    plain = open_engine(tmp_path / "engine", kv_cache_tokens=POOL)
    assert difference(in_chunks(plain, TOKENS, TABLE, [150]), wanted) > 10 * BOUND
    assert difference(in_chunks(ours, TOKENS, TABLE, [150]), wanted) < BOUND


def write_half(checkpoint: Path, folder: Path) -> Path:
    source = Checkpoint(checkpoint)
    config = read_config(source.config, str(checkpoint))
    folder.mkdir()
    return write_onnx(config, CheckpointWeights(config, source), folder, dtype=torch.float16)


@pytest.mark.parametrize("scheme", [None, *SCHEMES], ids=str)
def test_a_float16_graph_is_float16_throughout_and_drifts_by_its_rounding(
    scheme: IntScheme | None, tmp_path: Path
) -> None:
    """Numbers of 11 bits, rounded anew in each of 3 layers: a percent or so of a logit."""
    checkpoint = write_family("qwen3", tmp_path / "source", torch.float16)
    if scheme is not None:
        checkpoint = write_quantized(checkpoint, tmp_path / "model", {"mlp": scheme}, torch.float16)
    file = write_half(checkpoint, tmp_path / "half")
    onnx.checker.check_model(file, full_check=True)
    kinds = {proto.data_type for proto in onnx.load(file, load_external_data=False).graph.initializer}
    assert TensorProto.BFLOAT16 not in kinds
    assert TensorProto.FLOAT16 in kinds
    spec = compile_engine(checkpoint, "onnx", tmp_path / "engine")
    half = OnnxEngine(file, spec, kv_cache_tokens=POOL, threads=1)
    wanted = in_chunks(open_engine(checkpoint, kv_cache_tokens=POOL), TOKENS, TABLE, [150])
    assert BOUND < difference(in_chunks(half, TOKENS, TABLE, [126, 1]), wanted) < 0.03


def test_a_weight_that_float16_cannot_hold_is_refused(tiny_copy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    save_file(tensors, tiny_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QtoolError, match="100000, more than float16 can hold"):
        write_half(tiny_copy, tmp_path / "half")


def test_the_graph_has_the_inputs_and_outputs_that_its_docstring_says(
    compiled: Compiler, tmp_path: Path
) -> None:
    compiled(write_family("qwen2-window", tmp_path / "model"))
    file = tmp_path / "engine" / MODEL
    onnx.checker.check_model(file, full_check=True)
    graph = onnx.load(file, load_external_data=False).graph

    def described(values: list[onnx.ValueInfoProto]) -> dict[str, str]:
        kinds = {value.name: value.type.tensor_type for value in values}
        return {
            name: f"{TensorProto.DataType.Name(kind.elem_type)} "
            + ",".join(str(dim.dim_param or dim.dim_value) for dim in kind.shape.dim)
            for name, kind in kinds.items()
        }

    pools = {f"{kind}_pool.{i}": "FLOAT pool_rows,32,16" for i in range(3) for kind in ("key", "value")}
    assert described(list(graph.input)) == {
        "token_ids": "INT32 B,S",
        "positions": "INT32 B,S",
        "block_tables": "INT32 B,M",
        "logit_rows": "INT32 R",
        "attention_mask": "BOOL B,1,S,P+S",
        "attention_mask.40": "BOOL B,1,S,P+S",
        **pools,
    }
    new = {f"new_{kind}.{i}": "FLOAT B,2,S,16" for i in range(3) for kind in ("key", "value")}
    assert described(list(graph.output)) == {"logits": "FLOAT R,101", **new}


def test_a_tied_head_is_stored_once(compiled: Compiler, tiny: Path, tmp_path: Path) -> None:
    compiled(tiny)
    graph = onnx.load(tmp_path / "engine" / MODEL, load_external_data=False).graph
    assert [list(proto.dims) for proto in graph.initializer].count([320, 96]) == 1  # of vocabulary, hidden


def test_another_precision_of_the_pool_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kv_cache 'u8' is not possible for target onnx; wanted f32"):
        compile_engine(tiny, "onnx", tmp_path / "engine", kv_cache="u8")
    assert not (tmp_path / "engine").exists()


def test_a_damaged_graph_is_said_plainly(compiled: Compiler, tiny: Path, tmp_path: Path) -> None:
    compiled(tiny)
    file = tmp_path / "engine" / MODEL
    size = file.stat().st_size
    file.write_bytes(b"nothing".ljust(size))
    with pytest.raises(QtoolError, match="cannot be opened by ONNX Runtime"):
        open_engine(tmp_path / "engine")
    file.write_bytes(b"nothing")
    with pytest.raises(QtoolError, match=rf"has 7 bytes, engine\.json says {size}"):
        open_engine(tmp_path / "engine")


def test_a_real_model_in_chunks_and_one_by_one_gives_the_greedy_tokens_of_the_reference(
    smollm2: Path, compiled: Compiler, tmp_path: Path
) -> None:
    schemes = {"down_proj": IntScheme(4, 64, False)}
    checkpoint = write_quantized(smollm2, tmp_path / "model", schemes, torch.float16)
    prompt = np.random.default_rng(3).integers(0, 49152, 70).tolist()
    answers = [
        greedy(engine, prompt, 12)
        for engine in (compiled(checkpoint), open_engine(checkpoint, kv_cache_tokens=POOL))
    ]
    assert answers[0] == answers[1]


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    logits, tokens = in_chunks(engine, prompt, TABLE, [41, 29])[-1], list(prompt)
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = engine.run(step_of(Chunk(tokens[-1:], len(tokens) - 1, TABLE)))[-1]
    return tokens[len(prompt) :]
