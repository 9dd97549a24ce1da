"""The Triton source: `attend`, one step's attention over a paged pool, and `merge`, which joins its splits.

An online softmax over tiles of keys (FlashAttention-2, section 3.1), split over the keys where the batch
alone can't fill a GPU (Flash-Decoding), over a paged pool (PagedAttention, section 4). Two things are
particular. The pool is only read: the step's own keys and values come as tensors and the runtime commits
what was accepted, so a rejected draft leaves no trace. And the query heads that share a KV head are rows of
one tile, so that a key is loaded once for all of them and even one token's decode fills tensor cores.

Arguments that are not written `tl.constexpr` come in the order of a TensorRT plugin: inputs, scalars,
outputs. Every tensor is contiguous.
"""
# Triton's language is a subset of Python whose pointers have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def _widen(codes, dtype: tl.constexpr):
    """Pool elements in the dtype that the products take; exact for int8 and e4m3, which both dtypes hold."""
    if codes.dtype == tl.uint8:
        # e4m3 bytes where the GPU has no conversion (before sm_89): the bits moved to where fp16 has them are
        # the value / 2**8, subnormals included, since fp16's exponent bias is 15 and e4m3's is 7.
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    if codes.dtype == dtype:
        return codes
    if dtype == tl.float16:
        return codes.to(tl.float16)
    return codes.to(tl.float32).to(dtype)  # neither GPUs nor the interpreter go from codes to bfloat16


@triton.jit
def _accumulate(scores, visible, values, total, largest, weighted):
    """One tile of keys into the online softmax. `scores` are base-2 logits; rows may see nothing at all."""
    scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # A row that has seen no key yet has -inf here, and -inf - -inf is not a number.
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(largest - shift)
    total = total * decay + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(values.dtype), values, weighted * decay[:, None])
    return total, new_largest, weighted


# Not specialized: batches change at every step, and each way that they divide by 16 would be compiled anew.
@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "max_blocks", "tree_width"])
def attend(
    queries,  # [T, H, D]
    new_keys,  # [T, Hkv, D]
    new_values,  # [T, Hkv, D]
    key_pool,  # [num_blocks, Hkv, block_size, D]
    value_pool,  # [num_blocks, Hkv, block_size, D]
    block_tables,  # [B, max_blocks]
    past_lens,  # [B]
    new_starts,  # [B + 1]
    positions,  # [T]
    tree,  # [T, tree_width], read if has_tree
    key_scales,  # [Hkv], read if has_scales
    value_scales,  # [Hkv], read if has_scales
    num_tokens,
    num_sequences,
    max_blocks,
    tree_width,
    output,  # [T, H, D]; if split, [S, T, H, D] in float32
    lse,  # None; if split, [S, T, H] in float32: the base-2 log of each row's sum
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_size: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,  # 0: none
    has_tree: tl.constexpr,
    has_scales: tl.constexpr,
    split: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_dims: tl.constexpr,  # head_dim rounded up to a power of two
):
    """Grid (T // tile_tokens + B, Hkv, S), where tile_tokens = tile_rows // (H // Hkv)."""
    group: tl.constexpr = num_heads // num_kv_heads
    tile_tokens: tl.constexpr = tile_rows // group
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Sequence i's tiles start at new_starts[i] // tile_tokens + i: room for each, with the grid's size known
    # from T and B alone. Look for the last sequence that starts at or before this tile.
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(new_starts + middle) // tile_tokens + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(new_starts + sequence)
    new_len = tl.load(new_starts + sequence + 1) - start
    first = (tile - start // tile_tokens - sequence) * tile_tokens
    if first >= new_len:
        return
    past_len = tl.load(past_lens + sequence)

    rows = tl.arange(0, tile_rows)
    keys = tl.arange(0, tile_keys)
    dims = tl.arange(0, tile_dims)
    index = first + rows // group  # of the row's token among its sequence's new ones
    is_row = (rows < tile_tokens * group) & (index < new_len)
    is_dim = dims < head_dim
    query_rows = (start + index) * num_heads + kv_head * group + rows % group
    query = tl.load(
        queries + query_rows[:, None] * head_dim + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    position = tl.load(positions + start + index, mask=is_row, other=2147483647)

    # The keys that this tile may see, past and new, as one list of key tiles; each split takes a part of it.
    new_end = tl.minimum(first + tile_tokens, new_len)
    past_begin = 0
    new_begin = 0
    if window > 0:
        oldest = tl.maximum(tl.min(position, 0) - window + 1, 0)
        past_begin = tl.minimum(oldest, past_len) // tile_keys * tile_keys
        if not has_tree:  # in a tree, index and position part ways
            new_begin = tl.maximum(oldest - past_len, 0) // tile_keys * tile_keys
    past_tiles = tl.cdiv(past_len - past_begin, tile_keys)
    num_tiles = past_tiles + tl.cdiv(new_end - new_begin, tile_keys)
    share = tl.cdiv(num_tiles, tl.num_programs(2))
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, num_tiles)

    total = tl.zeros([tile_rows], tl.float32)
    largest = tl.full([tile_rows], float("-inf"), tl.float32)
    weighted = tl.zeros([tile_rows, tile_dims], tl.float32)
    new_scale: tl.constexpr = scale * 1.4426950408889634  # log2(e): exp2 is the GPU's own
    past_scale = new_scale
    if has_scales:
        past_scale = tl.load(key_scales + kv_head) * new_scale

    for step in range(begin, tl.minimum(end, past_tiles)):
        key_position = past_begin + step * tile_keys + keys
        is_key = key_position < past_len
        block = tl.load(
            block_tables + sequence * max_blocks + key_position // block_size, mask=is_key, other=0
        )
        # 64 bits: a pool may hold more than 2**31 elements.
        slot = (block.to(tl.int64) * num_kv_heads + kv_head) * block_size + key_position % block_size
        key_at = key_pool + slot[None, :] * head_dim + dims[:, None]
        key = _widen(tl.load(key_at, mask=is_key[None, :] & is_dim[:, None], other=0.0), query.dtype)
        visible = is_row[:, None] & is_key[None, :]
        if window > 0:
            visible = visible & (key_position[None, :] > position[:, None] - window)
        value_at = value_pool + slot[:, None] * head_dim + dims[None, :]
        value = _widen(tl.load(value_at, mask=is_key[:, None] & is_dim[None, :], other=0.0), query.dtype)
        scores = tl.dot(query, key) * past_scale
        total, largest, weighted = _accumulate(scores, visible, value, total, largest, weighted)

    if has_scales:  # one scale for all of this head's past values: it leaves the sum
        weighted = weighted * tl.load(value_scales + kv_head)

    for step in range(tl.maximum(begin, past_tiles), end):
        key_index = new_begin + (step - past_tiles) * tile_keys + keys
        is_key = key_index < new_end
        key_rows = (start + key_index) * num_kv_heads + kv_head
        key_at = new_keys + key_rows[None, :] * head_dim + dims[:, None]
        key = tl.load(key_at, mask=is_key[None, :] & is_dim[:, None], other=0.0)
        visible = is_row[:, None] & is_key[None, :] & (key_index[None, :] <= index[:, None])
        if has_tree:
            seen = tree + (start + index)[:, None] * tree_width + key_index[None, :]
            visible = visible & (tl.load(seen, mask=visible, other=0) != 0)
        if window > 0:
            key_position = tl.load(positions + start + key_index, mask=is_key, other=0)
            visible = visible & (key_position[None, :] > position[:, None] - window)
        value_at = new_values + key_rows[:, None] * head_dim + dims[None, :]
        value = tl.load(value_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(query, key) * new_scale
        total, largest, weighted = _accumulate(scores, visible, value, total, largest, weighted)

    # A row that saw nothing is all zeros, and weighs nothing in a merge: 0 + log2(0).
    attended = weighted / tl.where(total > 0.0, total, 1.0)[:, None]
    output_rows = query_rows.to(tl.int64)
    if split:
        output_rows += tl.program_id(2).to(tl.int64) * num_tokens * num_heads
        sums = tl.where(total > 0.0, largest + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse + output_rows, sums, mask=is_row)
    tl.store(
        output + output_rows[:, None] * head_dim + dims[None, :],
        attended.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge(
    parts,  # [S, T, H, D] in float32
    lse,  # [S, T, H] in float32
    queries,  # this and the next are inputs of the plugin for their shapes alone
    block_tables,
    num_rows,  # T * H
    num_splits,  # S
    output,  # [T, H, D]
    head_dim: tl.constexpr,
    max_splits: tl.constexpr,  # a power of two
    tile_dims: tl.constexpr,
):
    """Grid (T * H,): a row's splits weighted by their shares of its softmax's sum."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, max_splits)
    dims = tl.arange(0, tile_dims)
    is_split = splits < num_splits
    is_dim = dims < head_dim
    rows = splits.to(tl.int64) * num_rows + row
    sums = tl.load(lse + rows, mask=is_split, other=float("-inf"))
    largest = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total > 0.0, total, 1.0)
    part = tl.load(
        parts + rows[:, None] * head_dim + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )
    merged = tl.sum(part * weights[:, None], 0)
    tl.store(output + row * head_dim + dims, merged.to(output.dtype.element_ty), mask=is_dim)
