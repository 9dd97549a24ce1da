"""Launch the kernels on torch tensors: attention for the torch engine on CUDA."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from qtool.compile.kernels.paged_attention import attend, merge
from qtool.compile.kernels.spec import (
    MAX_SPLITS,
    MERGE_TILE,
    AttentionSpec,
    Dtype,
    PoolDtype,
    choose_tile,
    constants,
    grid,
    merge_constants,
    num_splits,
)
from qtool.errors import UsageError

Name = TypeVar("Name", Dtype, PoolDtype)
DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
POOL_DTYPES: dict[torch.dtype, PoolDtype] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3",
}


@dataclass(frozen=True)
class Batch:
    """A ragged step on the device, the same for every layer: B sequences with T new tokens in all."""

    block_tables: torch.Tensor
    """[B, max_blocks] int32, a sequence's blocks of the pool in its order; past its end nothing is read."""
    past_lens: torch.Tensor
    """[B] int32, tokens in the pool."""
    new_starts: torch.Tensor
    """[B + 1] int32, where each sequence's new tokens start among the T; the last is T."""
    positions: torch.Tensor
    """[T] int32, of each new token in its sequence: past length plus index, or plus depth in a tree."""
    tree: torch.Tensor | None = None
    """[T, W] bool, W no less than the most new tokens of a sequence: row t says which new tokens of its own
    sequence token t sees, by their index, itself included. In any case it sees none that come after it."""


def paged_attention(
    queries: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention [T, H, D] of new tokens over the past in the pool and over one another.

    queries [T, H, D] and new_keys, new_values [T, Hkv, D], positions rotated in, are float16 or bfloat16.
    Pools [num_blocks, Hkv, block_size, D] have the same dtype, or are int8 or float8_e4m3fn with float32
    scales [Hkv] or [1]. They are only read: the caller commits new_keys and new_values. All is contiguous.
    `window` 0 means none. `splits` is into how many parts to cut the keys; by default, what fills the GPU.

    Raises UsageError naming the tensor whose shape or dtype does not fit.
    """
    spec = AttentionSpec(
        num_heads=queries.shape[1],
        num_kv_heads=new_keys.shape[1],
        head_dim=queries.shape[2],
        block_size=key_pool.shape[2],
        scale=scale,
        dtype=_dtype("queries", queries, DTYPES),
        pool_dtype=_dtype("key_pool", key_pool, POOL_DTYPES),
        window=window,
        tree=batch.tree is not None,
    )
    tokens, sequences = queries.shape[0], batch.past_lens.shape[0]
    _check(spec, tokens, sequences, new_keys, new_values, key_pool, value_pool, batch)
    if spec.quantized:
        key_scales = _scales("key_scales", spec, key_scales)
        value_scales = _scales("value_scales", spec, value_scales)
        if spec.pool_dtype == "float8_e4m3" and not _converts_fp8(queries.device):
            key_pool, value_pool = key_pool.view(torch.uint8), value_pool.view(torch.uint8)
    max_blocks = batch.block_tables.shape[1]
    parts = num_splits(spec, tokens, sequences, max_blocks) if splits is None else splits
    if not 1 <= parts <= MAX_SPLITS:
        raise UsageError(f"paged attention: splits {parts}; it wants 1 to {MAX_SPLITS}")
    spec = replace(spec, split=parts > 1)
    tile = choose_tile(spec, tokens, sequences)
    output, lse = torch.empty_like(queries), None
    attended = output
    if spec.split:
        attended = torch.empty((parts, *queries.shape), dtype=torch.float32, device=queries.device)
        lse = torch.empty(attended.shape[:3], dtype=torch.float32, device=queries.device)
    attend[grid(spec, tile, tokens, sequences, parts)](
        queries,
        new_keys,
        new_values,
        key_pool,
        value_pool,
        batch.block_tables,
        batch.past_lens,
        batch.new_starts,
        batch.positions,
        batch.tree,
        key_scales,
        value_scales,
        tokens,
        sequences,
        max_blocks,
        0 if batch.tree is None else batch.tree.shape[1],
        attended,
        lse,
        **constants(spec, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if spec.split:
        rows = tokens * spec.num_heads
        merge[(rows,)](
            attended,
            lse,
            queries,
            batch.block_tables,
            rows,
            parts,
            output,
            **merge_constants(spec.head_dim),
            num_warps=MERGE_TILE.num_warps,
        )
    return output


def _dtype(name: str, tensor: torch.Tensor, known: Mapping[torch.dtype, Name]) -> Name:
    if tensor.dtype not in known:
        wanted = ", ".join(str(dtype) for dtype in known)
        raise UsageError(f"paged attention: {name} is {tensor.dtype}; it wants one of {wanted}")
    return known[tensor.dtype]


def _check(
    spec: AttentionSpec,
    tokens: int,
    sequences: int,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    batch: Batch,
) -> None:
    """A kernel reads whatever lies at an address: shapes that disagree have to be found before."""
    new = (tokens, spec.num_kv_heads, spec.head_dim)
    pool = (key_pool.shape[0], spec.num_kv_heads, spec.block_size, spec.head_dim)
    width = batch.block_tables.shape[-1]
    dtype = getattr(torch, spec.dtype)
    wanted = [
        ("new_keys", new_keys, new, dtype),
        ("new_values", new_values, new, dtype),
        ("key_pool", key_pool, pool, key_pool.dtype),
        ("value_pool", value_pool, pool, key_pool.dtype),
        ("block_tables", batch.block_tables, (sequences, width), torch.int32),
        ("past_lens", batch.past_lens, (sequences,), torch.int32),
        ("new_starts", batch.new_starts, (sequences + 1,), torch.int32),
        ("positions", batch.positions, (tokens,), torch.int32),
    ]
    if batch.tree is not None:
        wanted.append(("tree", batch.tree, (tokens, batch.tree.shape[-1]), torch.bool))
    for name, tensor, shape, kind in wanted:
        if tensor.shape != shape or tensor.dtype != kind or not tensor.is_contiguous():
            strided = "" if tensor.is_contiguous() else ", not contiguous"
            raise UsageError(
                f"paged attention: {name} is {list(tensor.shape)} {tensor.dtype}{strided}; "
                f"it wants {list(shape)} {kind}, contiguous"
            )


def _scales(name: str, spec: AttentionSpec, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None or scales.dtype != torch.float32 or scales.shape not in ((spec.num_kv_heads,), (1,)):
        got = None if scales is None else f"{list(scales.shape)} {scales.dtype}"
        raise UsageError(
            f"paged attention: {name} is {got}; a {spec.pool_dtype} pool wants "
            f"[{spec.num_kv_heads}] or [1] float32"
        )
    return scales.expand(spec.num_kv_heads).contiguous()


def _converts_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
