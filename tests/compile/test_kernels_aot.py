"""Kernels compiled for GPUs that are not here, and the rules by which they are launched."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.compile.kernels.aot import SHARED_LIMITS, CompiledKernel, compile_ahead, compile_merge
from qtool.compile.kernels.spec import (
    MAX_SPLITS,
    AttentionSpec,
    choose_tile,
    grid,
    max_partial_rows,
    num_splits,
    tiles,
)
from qtool.errors import QtoolError, UsageError

SMOLLM2 = AttentionSpec(9, 3, 64, 16, 0.125)
LLAMA_8B = AttentionSpec(32, 8, 128, 16, 0.088)
GEMMA_1B = AttentionSpec(4, 1, 256, 32, 0.0625, "bfloat16", "bfloat16", window=512)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Triton's cache of compiled kernels, so that these are compiled now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def assert_is_for(kernel: CompiledKernel, cc: int) -> None:
    assert re.search(rf"\.target sm_{cc}a?$", kernel.ptx, re.MULTILINE)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.shared <= 48 * 1024
    # Some of Triton's schedules leave a few words in local memory; more would be a tile that does not fit.
    assert kernel.spilled <= 16
    assert kernel.registers * kernel.threads <= 65536
    assert "/" not in re.sub(r"//.*", "", kernel.ptx), "folders of this machine in the PTX"


@pytest.mark.parametrize("cc", SHARED_LIMITS)
def test_decode_of_an_8_bit_pool_is_compiled_for_every_gpu(cc: int) -> None:
    spec = replace(LLAMA_8B, pool_dtype="float8_e4m3", split=True)
    kernel = compile_ahead(spec, cc, tiles(spec)[0])
    assert_is_for(kernel, cc)
    assert len(re.findall(r"\.param \.u64", kernel.ptx)) == 14
    assert len(re.findall(r"\.param \.u32", kernel.ptx)) == 4
    converts = "cvt.rn.f16x2.e4m3x2" in kernel.ptx
    assert converts == (cc >= 89), "the bytes are taken apart by hand on sm_80 alone"


@pytest.mark.parametrize("cc", SHARED_LIMITS)
def test_prompt_chunks_are_compiled_for_every_gpu_with_tensor_cores(cc: int) -> None:
    kernel = compile_ahead(SMOLLM2, cc, tiles(SMOLLM2)[1])
    assert_is_for(kernel, cc)
    product = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[cc]
    assert product in kernel.ptx


@pytest.mark.parametrize("cc", SHARED_LIMITS)
def test_merge_is_compiled_for_every_gpu(cc: int) -> None:
    assert_is_for(compile_merge(128, "bfloat16", cc), cc)


@pytest.mark.parametrize("cc", [90, 100])  # their products read the queries from shared memory too
@pytest.mark.parametrize(
    "spec",
    [
        replace(LLAMA_8B, tree=True),
        replace(LLAMA_8B, pool_dtype="int8"),
        replace(LLAMA_8B, num_kv_heads=1),
        GEMMA_1B,
        replace(GEMMA_1B, num_heads=32, pool_dtype="int8", tree=True),
    ],
)
def test_every_tile_fits_a_launch_that_asks_for_no_more_shared_memory(spec: AttentionSpec, cc: int) -> None:
    for tile in tiles(spec):
        assert_is_for(compile_ahead(spec, cc, tile), cc)


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="compute capability 75; known: 80, 89, 90, 100"):
        compile_ahead(SMOLLM2, 75, tiles(SMOLLM2)[0])


def test_a_tile_beyond_the_gpu_s_shared_memory_is_refused() -> None:
    tile = replace(tiles(LLAMA_8B)[1], rows=128, keys=128, num_stages=3)
    with pytest.raises(QtoolError, match=r"tile of 128 rows and 128 keys takes .* sm_89 has 99 KiB"):
        compile_ahead(LLAMA_8B, 89, tile)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 10}, "10 query heads over 3 KV heads"),
        ({"num_heads": 99}, "at most 32, for each KV head"),
        ({"head_dim": 100}, "head_dim 100; it wants a multiple of 8"),
        ({"head_dim": 264}, "head_dim 264"),
        ({"pool_dtype": "bfloat16"}, "a bfloat16 pool under float16 queries"),
    ],
)
def test_an_attention_that_no_kernel_does_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SMOLLM2, **change)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=12), st.sampled_from([SMOLLM2, LLAMA_8B, GEMMA_1B]))
def test_the_grid_has_a_tile_for_every_token_and_no_two_for_one(
    new_lens: list[int], spec: AttentionSpec
) -> None:
    """Sequence i starts at tile starts[i] // tokens + i: that leaves each sequence the room it takes."""
    starts = [sum(new_lens[:count]) for count in range(len(new_lens) + 1)]
    for tile in tiles(spec):
        tokens = tile.tokens(spec)
        first = [start // tokens + sequence for sequence, start in enumerate(starts)]
        for length, (begin, end) in zip(new_lens, pairwise(first), strict=True):
            assert begin + -(-length // tokens) <= end
        assert first[-1] == grid(spec, tile, starts[-1], len(new_lens), 1)[0]


@given(
    st.integers(1, 8192),
    st.integers(1, 256),
    st.integers(1, 4096),
    st.sampled_from([SMOLLM2, LLAMA_8B, GEMMA_1B]),
)
def test_splits_stay_within_what_merge_holds_and_what_the_keys_are_worth(
    tokens: int, sequences: int, max_blocks: int, spec: AttentionSpec
) -> None:
    splits = num_splits(spec, tokens + sequences, sequences, max_blocks)
    assert 1 <= splits <= MAX_SPLITS
    assert splits * (tokens + sequences) <= max_partial_rows(spec, tokens + sequences)
    keys = min(max_blocks * spec.block_size, spec.window or 2**31)
    assert splits == 1 or keys >= splits * 256


def test_decode_takes_the_narrow_tile_and_a_chunk_the_wide_one() -> None:
    narrow, wide = tiles(LLAMA_8B)
    assert choose_tile(LLAMA_8B, 8, 8) == narrow
    assert choose_tile(LLAMA_8B, 32, 8) == narrow  # four drafts of four heads fill its rows
    assert choose_tile(LLAMA_8B, 512, 1) == wide
