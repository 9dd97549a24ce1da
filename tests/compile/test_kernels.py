"""Paged attention in Triton's interpreter against a plain loop over tokens.

Triton decides when it is imported whether kernels are compiled or interpreted, so the interpreter has a
process to itself, and this one stays free for the tests that compile.
"""

import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from qtool.compile.kernels.launch import Batch, paged_attention
from qtool.errors import UsageError

Attention = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Attention]:
    """Call a function of kernels_interpreter.py by name; warnings are errors there too."""
    worker = Path(__file__).with_name("kernels_interpreter.py")
    with Popen([sys.executable, worker], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def call(name: str, *arguments: object, **options: object) -> torch.Tensor:
            content = io.BytesIO()
            torch.save((name, arguments, options), content)  # pickle alone can't do float8
            pickle.dump(content.getvalue(), requests)
            requests.flush()
            reply = torch.load(io.BytesIO(pickle.load(replies)), weights_only=False)
            if isinstance(reply, Exception):
                raise reply
            assert isinstance(reply, torch.Tensor)
            return reply

        yield call
        requests.close()
        assert process.wait() == 0


@pytest.fixture(scope="module")
def attention(interpret: Attention) -> Attention:
    """`paged_attention`, interpreted."""
    return partial(interpret, "paged_attention")


@dataclass(frozen=True)
class Case:
    """Seeded inputs of one step. Pool slots that no sequence owns hold what must not be read: NaN."""

    lens: tuple[tuple[int, int], ...]
    """Past and new tokens of each sequence."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    scale: float = 0.2

    def tensors(self) -> tuple[list[torch.Tensor], Batch]:
        generator = torch.Generator().manual_seed(len(self.lens) + self.head_dim)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        new = [count for _, count in self.lens]
        tokens, kv = sum(new), (self.num_kv_heads, self.head_dim)
        blocks = [math.ceil((past + count) / self.block_size) for past, count in self.lens]
        order = torch.randperm(sum(blocks) + 1, generator=generator).tolist()
        # Beyond a sequence's blocks its table names a block that does not exist.
        tables = torch.full((len(blocks), max(blocks)), 10**6, dtype=torch.int32)
        shape = (len(order), self.num_kv_heads, self.block_size, self.head_dim)
        pools = [torch.full(shape, math.nan, dtype=self.dtype) for _ in range(2)]
        for row, ((past, _), count) in enumerate(zip(self.lens, blocks, strict=True)):
            mine = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(mine)
            for position in range(past):
                for pool in pools:
                    block = mine[position // self.block_size]
                    pool[block, :, position % self.block_size] = normal(*kv)
        starts = torch.tensor([0, *new]).cumsum(0).int()
        positions = torch.cat([torch.arange(past, past + count) for past, count in self.lens]).int()
        batch = Batch(tables, torch.tensor([past for past, _ in self.lens]).int(), starts, positions)
        return [
            normal(tokens, self.num_heads, self.head_dim),
            normal(tokens, *kv),
            normal(tokens, *kv),
            *pools,
        ], batch


def reference(
    tensors: list[torch.Tensor],
    batch: Batch,
    scale: float,
    window: int,
    scales: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """One token at a time, in float64."""
    queries, new_keys, new_values, key_pool, value_pool = (tensor.double() for tensor in tensors)
    if scales:
        key_pool, value_pool = (
            pool * s[:, None, None] for pool, s in zip((key_pool, value_pool), scales, strict=True)
        )
    group = queries.shape[1] // new_keys.shape[1]
    output = torch.zeros_like(queries)
    for sequence, (start, end) in enumerate(zip(batch.new_starts[:-1], batch.new_starts[1:], strict=True)):
        past = int(batch.past_lens[sequence])
        slots = [divmod(position, key_pool.shape[2]) for position in range(past)]
        table = batch.block_tables[sequence]
        past_keys = [key_pool[table[block], :, offset] for block, offset in slots]
        past_values = [value_pool[table[block], :, offset] for block, offset in slots]
        for token in range(start, end):
            keys, values, at = list(past_keys), list(past_values), list(range(past))
            for other in range(start, token + 1):
                if batch.tree is None or batch.tree[token, other - start]:
                    keys.append(new_keys[other])
                    values.append(new_values[other])
                    at.append(int(batch.positions[other]))
            near = [i for i in range(len(at)) if not window or at[i] > batch.positions[token] - window]
            if near:
                key = torch.stack(keys)[near].repeat_interleave(group, 1)
                value = torch.stack(values)[near].repeat_interleave(group, 1)
                weights = (torch.einsum("hd,khd->hk", queries[token], key) * scale).softmax(1)
                output[token] = torch.einsum("hk,khd->hd", weights, value)
    return output


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max())


# Outputs are weighted means of normal values, below 4 in size. The weights and the output are each rounded
# once to 11 bits (float16): 4 * 2 * 2**-11. The interpreter cuts bfloat16 to 8 bits instead of rounding.
BOUNDS = {torch.float16: 4 * 2 * 2**-11, torch.bfloat16: 4 * 2 * 2**-7}

# Decode at past lengths beside the ends of blocks and tiles, a prompt's first chunk and a later one, drafts.
MIXED = ((0, 1), (15, 1), (16, 1), (33, 5), (0, 11), (31, 3), (70, 1))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "splits"),
    [
        (1, 1, 64, 16, torch.float16, 1),
        (1, 1, 64, 16, torch.bfloat16, 3),
        (3, 1, 64, 32, torch.float16, 3),
        (6, 2, 80, 16, torch.float16, 1),
        (4, 4, 80, 32, torch.bfloat16, 2),
        (8, 2, 96, 16, torch.float16, 2),
        (9, 3, 96, 32, torch.bfloat16, 1),
        (8, 1, 128, 16, torch.float16, 1),
        (8, 2, 128, 32, torch.bfloat16, 3),
        (24, 1, 128, 16, torch.float16, 1),
        (4, 1, 256, 16, torch.float16, 1),
        (8, 1, 256, 32, torch.float16, 2),
        (3, 3, 256, 32, torch.bfloat16, 1),
    ],
)
def test_a_mixed_batch_agrees_with_one_token_at_a_time(
    attention: Attention,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    splits: int,
) -> None:
    case = Case(MIXED, num_heads, num_kv_heads, head_dim, block_size, dtype)
    tensors, batch = case.tensors()
    got = attention(*tensors, batch, scale=case.scale, splits=splits)
    assert got.dtype == dtype
    assert error(got, reference(tensors, batch, case.scale, 0)) <= BOUNDS[dtype]


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (1, 2), (7, 1), (32, 1), (40, 1), (40, 3)])
def test_a_sliding_window_sees_the_last_positions_only(
    attention: Attention, window: int, splits: int
) -> None:
    case = Case(((16, 1), (33, 5), (0, 11), (70, 1), (3, 70)), 3, 1)
    tensors, batch = case.tensors()
    got = attention(*tensors, batch, scale=case.scale, window=window, splits=splits)
    assert error(got, reference(tensors, batch, case.scale, window)) <= BOUNDS[case.dtype]


def test_a_long_chunk_takes_the_wide_tile_and_agrees(attention: Attention) -> None:
    case = Case(((0, 70), (37, 30), (5, 1)), num_heads=3, num_kv_heads=1)
    tensors, batch = case.tensors()
    got = attention(*tensors, batch, scale=case.scale)
    assert error(got, reference(tensors, batch, case.scale, 0)) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("splits", [2, 32])
def test_cutting_the_keys_changes_nothing_but_rounding(attention: Attention, splits: int) -> None:
    tensors, batch = Case(((300, 1), (0, 3), (161, 2)), num_heads=2, num_kv_heads=1).tensors()
    whole = attention(*tensors, batch, scale=0.2, splits=1)
    cut = attention(*tensors, batch, scale=0.2, splits=splits)
    assert error(cut, whole) <= BOUNDS[torch.float16]


@pytest.mark.parametrize("scale", [0.01, 8.0])
def test_flat_and_very_steep_softmaxes_stay_finite(attention: Attention, scale: float) -> None:
    tensors, batch = Case(((40, 1), (3, 9))).tensors()
    got = attention(*tensors, batch, scale=scale, splits=2)
    # float32 logits near 8 * 64 * 2 are off by up to 2**-14, and so are their weights, within the bound
    assert error(got, reference(tensors, batch, scale, 0)) <= BOUNDS[torch.float16]


# Parents of a draft tree's nodes, by index: the root is the last accepted token.
PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 0, 8)


def lineage(node: int) -> list[int]:
    return [*lineage(PARENTS[node]), node] if node >= 0 else []


def with_trees(case: Case, batch: Batch) -> Batch:
    """The first two sequences' new tokens become trees; the others stay chains."""
    width = max(count for _, count in case.lens)
    tree = torch.zeros(len(batch.positions), width, dtype=torch.bool)
    positions = batch.positions.clone()
    for sequence, (past, count) in enumerate(case.lens):
        for index in range(count):
            row = int(batch.new_starts[sequence]) + index
            seen = lineage(index) if sequence < 2 else list(range(index + 1))
            tree[row, seen] = True
            positions[row] = past + len(seen) - 1
    return replace(batch, tree=tree, positions=positions)


@pytest.mark.parametrize(("window", "splits"), [(0, 1), (0, 3), (4, 1), (21, 2)])
def test_every_path_of_a_tree_is_what_it_would_be_as_a_chain(
    attention: Attention, window: int, splits: int
) -> None:
    case = Case(((37, len(PARENTS)), (0, len(PARENTS)), (20, 3), (48, 1)), num_heads=6)
    tensors, batch = case.tensors()
    batch = with_trees(case, batch)
    got = attention(*tensors, batch, scale=case.scale, window=window, splits=splits)
    assert error(got, reference(tensors, batch, case.scale, window)) <= BOUNDS[case.dtype]
    for sequence, (past, count) in enumerate(case.lens[:2]):
        for leaf in range(count):
            path = [int(batch.new_starts[sequence]) + node for node in lineage(leaf)]
            chain = Batch(
                batch.block_tables[sequence : sequence + 1].clone(),
                torch.tensor([past]).int(),
                torch.tensor([0, len(path)]).int(),
                torch.arange(past, past + len(path)).int(),
            )
            new = [tensor[path] for tensor in tensors[:3]]
            alone = reference([*new, *tensors[3:]], chain, case.scale, window)
            assert error(got[path], alone) <= BOUNDS[case.dtype]


def test_a_token_that_sees_nothing_gets_zeros(attention: Attention) -> None:
    tensors, batch = Case(((0, 4), (0, 2))).tensors()
    blind = replace(batch, tree=torch.zeros(6, 4, dtype=torch.bool))
    for splits in (1, 2):
        got = attention(*tensors, blind, scale=0.2, splits=splits)
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("native", [True, False])
def test_every_e4m3_code_widens_to_its_value(interpret: Attention, native: bool, dtype: torch.dtype) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    got = interpret("widen", values if native else codes, dtype)
    assert torch.equal(got, values.to(dtype))


def quantized(pool: torch.Tensor, dtype: torch.dtype, per_head: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a pool and their scales; slots that nobody owns become the largest code."""
    largest = 127.0 if dtype == torch.int8 else 448.0
    peak = pool.float().nan_to_num().abs().amax((0, 2, 3))
    scales = (peak if per_head else peak.max().reshape(1)) / largest
    codes = (pool.float() / scales[:, None, None]).nan_to_num(largest)
    return (codes.round().to(dtype) if dtype == torch.int8 else codes.to(dtype)), scales


@pytest.mark.parametrize(
    ("dtype", "per_head", "splits"), [(torch.float16, True, 2), (torch.bfloat16, False, 1)]
)
@pytest.mark.parametrize("pool_dtype", [torch.int8, torch.float8_e4m3fn])
def test_an_8_bit_pool_is_read_exactly(
    attention: Attention, pool_dtype: torch.dtype, dtype: torch.dtype, per_head: bool, splits: int
) -> None:
    case = Case(MIXED, num_heads=6, num_kv_heads=2, head_dim=80, dtype=dtype)
    tensors, batch = case.tensors()
    (keys, key_scales), (values, value_scales) = (
        quantized(pool, pool_dtype, per_head) for pool in tensors[3:]
    )
    stored = [*tensors[:3], keys, values]
    got = attention(
        *stored, batch, scale=case.scale, splits=splits, key_scales=key_scales, value_scales=value_scales
    )
    wanted = reference(stored, batch, case.scale, 0, (key_scales, value_scales))
    assert error(got, wanted) <= BOUNDS[dtype]
    # What the codes lose: half a step of 1/127 of the peak for int8, 1/16 of each value for e4m3, in the
    # values and, through the logits, in the weights; normal values peak below 5.
    lost = error(got, reference(tensors, batch, case.scale, 0))
    assert 0 < lost <= (0.1 if pool_dtype == torch.int8 else 0.5)


CHECKED = Case(((5, 1), (0, 4)))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda t: t.float(), "queries is torch.float32"),
        (0, lambda t: t[:, :3], "3 query heads over 2 KV heads"),
        (1, lambda t: t[:-1], r"new_keys is \[4, 2, 64\]"),
        (2, lambda t: t.bfloat16(), "new_values is .*bfloat16; it wants .*float16"),
        (3, lambda t: t.bfloat16(), "a bfloat16 pool under float16 queries"),
        (3, lambda t: t.to(torch.int8), "value_pool is .*float16; it wants .*int8"),
        (4, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "value_pool .* not contiguous"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    place: int, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    tensors, batch = CHECKED.tensors()
    tensors[place] = change(tensors[place])
    with pytest.raises(UsageError, match=message):
        paged_attention(*tensors, batch, scale=0.2)


def test_a_batch_of_other_integers_or_other_lengths_is_named() -> None:
    tensors, batch = CHECKED.tensors()
    with pytest.raises(UsageError, match=r"positions is \[5\] torch.int64"):
        paged_attention(*tensors, replace(batch, positions=batch.positions.long()), scale=0.2)
    with pytest.raises(UsageError, match=r"new_starts is \[2\]"):
        paged_attention(*tensors, replace(batch, new_starts=batch.new_starts[:2]), scale=0.2)


def test_an_8_bit_pool_without_scales_is_refused() -> None:
    tensors, batch = CHECKED.tensors()
    tensors[3:] = [torch.zeros_like(pool, dtype=torch.int8) for pool in tensors[3:]]
    with pytest.raises(UsageError, match=r"key_scales is None; a int8 pool wants \[2\] or \[1\] float32"):
        paged_attention(*tensors, batch, scale=0.2)
