"""The TensorRT driver over the graph with plugins: their kernels in Triton's interpreter, the rest in ONNX's.

Run as a script, since Triton decides when it is imported whether kernels are compiled or interpreted. It
takes a checkpoint's folder, the folder of its graph with plugins and that of a reference engine, and tells
as JSON how far each step is from the reference and which profiles ran.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from qtool.compile.backends.tensorrt.info import EngineInfo, IoTensor, PoolLayout, ProfileInfo
from qtool.compile.backends.tensorrt.profiles import plan_profiles
from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.engine import read_spec
from qtool.compile.kernels.paged_attention import attend, merge
from qtool.compile.kernels.spec import (
    AttentionSpec,
    choose_tile,
    constants,
    grid,
    max_partial_rows,
    merge_constants,
    num_splits,
)
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import TensorRtOptions
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine, Floats, Step, slots_of
from tests.compile.steps import Chunk, difference, step_of
from tests.runtime.tensorrt_standin import open_with

Array = np.ndarray[Any, Any]
BLOCK = 32
OPTIONS = TensorRtOptions(max_num_seqs=3, chunk=24, max_context=128, draft_tokens=5)
TABLES = [[3, 0, 5], [1, 4]]
PARENTS = (-1, 0, 0, 1, 2, 4)
TOKENS = np.random.default_rng(2).integers(0, 101, 80).tolist()


def spec_of(node: OpRun) -> AttentionSpec:
    """What the attributes of a node say."""
    shape = node.num_heads, node.num_kv_heads, node.head_dim, node.block_size
    tree = bool(node.has_tree)
    return AttentionSpec(*shape, float(node.scale), window=node.window, tree=tree, split=True)


class Attend(OpRun):  # type: ignore[misc]
    """One launch of `attend` as the plugin asks TensorRT for it."""

    op_domain = "qtool"

    def _run(self, *inputs: Array, **_: object) -> tuple[Array, Array]:
        spec = spec_of(self)
        tensors = [torch.from_numpy(array.copy()) for array in inputs]
        (tokens, sequences), max_blocks = (len(tensors[0]), len(tensors[6])), tensors[5].shape[1]
        splits = num_splits(spec, tokens, sequences, max_blocks)
        tile = choose_tile(spec, tokens, sequences)
        parts = torch.full((max_partial_rows(spec, tokens), *tensors[0].shape[1:]), torch.nan)
        lse = torch.full(parts.shape[:2], torch.nan)
        attend[grid(spec, tile, tokens, sequences, splits)](
            *tensors, tokens, sequences, max_blocks, tensors[9].shape[1], parts, lse, **constants(spec, tile)
        )
        return parts.numpy(), lse.numpy()


class Merge(OpRun):  # type: ignore[misc]
    """One launch of `merge`."""

    op_domain = "qtool"

    def _run(self, parts: Array, lse: Array, queries: Array, tables: Array, **_: object) -> tuple[Array]:
        inputs = [torch.from_numpy(array.copy()) for array in (parts, lse, queries, tables)]
        splits = num_splits(spec_of(self), len(queries), *tables.shape)
        output, rows = torch.empty_like(inputs[2]), len(queries) * self.num_heads
        merge[(rows,)](*inputs, rows, splits, output, **merge_constants(self.head_dim))
        return (output.numpy(),)


class MatMul(OpRun):  # type: ignore[misc]
    """Products summed in float32 as a GPU sums them; numpy's of float16 take minutes."""

    def _run(self, a: Array, b: Array, **_: object) -> tuple[Array]:
        return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)


# the operators are found by their class's name
Attend.__name__, Merge.__name__ = "attend", "merge"


class Twin:
    """A graph that runs as an inference session does."""

    def __init__(self, model: Path) -> None:
        self._evaluator = ReferenceEvaluator(str(model), new_ops=[Attend, Merge, MatMul])

    def run(self, names: list[str], feeds: dict[str, Array]) -> list[Array]:
        found: list[Array] = self._evaluator.run(names, feeds)
        return found


def describe(model: Path, config: DecoderConfig) -> EngineInfo:
    """What the inspector would say of the plan, as far as the driver reads it."""
    kinds = {
        onnx.TensorProto.INT32: "Int32",
        onnx.TensorProto.BOOL: "Bool",
        onnx.TensorProto.FLOAT16: "Half",
        onnx.TensorProto.FLOAT: "Float",
    }
    profiles = plan_profiles(OPTIONS, config, BLOCK)
    graph = onnx.load(model, load_external_data=False).graph
    tensors = []
    for mode, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            kind = value.type.tensor_type
            shape = [dimension.dim_param or dimension.dim_value for dimension in kind.shape.dim]
            tensors.append(
                IoTensor(
                    name=value.name,
                    mode=mode,
                    dtype=kinds[kind.elem_type],
                    shape=tuple(-1 if isinstance(size, str) else size for size in shape),
                    profiles=tuple(profile.shapes(shape) for profile in profiles) if mode == "input" else (),
                )
            )
    pool = PoolLayout(
        dtype="Half",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK,
        head_dim=config.head_dim,
        max_blocks=profiles[0].sizes["pool_rows"].high // config.num_kv_heads,
    )
    return EngineInfo(
        target="tensorrt",
        builder_version="",
        compute_capabilities=(),
        plan_bytes=0,
        weight_bytes=1 << 30,
        predicted_weight_bytes=0,
        predicted_plan_bytes=0,
        profiles=tuple(
            ProfileInfo(kind=profile.kind, sizes=dict(profile.sizes), activation_bytes=0)
            for profile in profiles
        ),
        pool=pool,
        max_context=128,
        tensors=tuple(tensors),
        folded_zero_points=0,
        requantized={},
        layers=(),
    )


def steps(engine: Engine) -> list[Floats]:
    """Prompts in chunks, decoding, a tree of drafts beside a token, and what follows the accepted path."""
    prompt = step_of(Chunk(TOKENS[:38], 0, TABLES[0]), Chunk(TOKENS[:7], 0, TABLES[1]), rows=[0, 23, 37, 44])
    decoded = step_of(Chunk(TOKENS[38:39], 38, TABLES[0]), Chunk(TOKENS[7:8], 7, TABLES[1]))
    mask = np.eye(len(PARENTS), dtype=np.bool_)
    for node, parent in enumerate(PARENTS[1:], 1):
        mask[node] |= mask[parent]
    chain = step_of(Chunk(TOKENS[40:46], 39, TABLES[0]), Chunk(TOKENS[8:11], 8, TABLES[1]))
    positions = chain.positions.copy()
    positions[:6] = 39 + mask.sum(1) - 1
    tree = Step(**{**vars(chain), "positions": positions, "masks": [mask, None]})
    logits = [engine.run(step) for step in (prompt, decoded, tree)]
    path = np.array([0, 2, 4, 5], np.int32)
    engine.move_slots(
        slots_of(TABLES[0], 39 + path, BLOCK), slots_of(TABLES[0], 39 + np.arange(4, dtype=np.int32), BLOCK)
    )
    return [*logits, engine.run(step_of(Chunk(TOKENS[50:51], 43, TABLES[0])))]


def main(checkpoint: Path, graph: Path, reference: Path) -> None:
    config = read_config(Checkpoint(checkpoint).config, str(checkpoint))
    model = graph / "model.onnx"
    engine, contexts, _ = open_with(
        Twin(model), read_spec(reference), describe(model, config), kv_cache_tokens=8 * BLOCK, capture=False
    )
    wanted = steps(open_engine(reference, kv_cache_tokens=8 * BLOCK))
    far = [difference(got, want) for got, want in zip(steps(engine), wanted, strict=True)]
    ran = sorted({profile for context in contexts for profile, _ in context.launches})
    json.dump({"far": far, "profiles": ran}, sys.stdout)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
