"""How ragged steps become calls, for any step and any limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qtool.compile.backends.tensorrt.info import EngineInfo, Kind, PoolLayout, ProfileInfo
from qtool.runtime.engines.contract import Step
from qtool.runtime.engines.padded import pad
from qtool.runtime.engines.tensorrt_calls import Call, grow, plan_calls, round_up, step_of

BLOCK = 4


def info_of(max_num_seqs: int, chunk: int, drafts: int, weight_bytes: int) -> EngineInfo:
    """A record with these limits and little else."""
    batch = (1, max_num_seqs, max_num_seqs)
    kinds: list[tuple[Kind, tuple[int, int, int], tuple[int, int, int]]] = [
        ("prefill", (1, 1, 2), (1, chunk, chunk)),
        ("decode", batch, (1, 1, 1)),
    ]
    if drafts:
        kinds.append(("verify", batch, (2, drafts + 1, drafts + 1)))
    return EngineInfo(
        target="tensorrt-rtx",
        builder_version="1",
        compute_capabilities=(),
        plan_bytes=0,
        weight_bytes=weight_bytes,
        predicted_weight_bytes=0,
        predicted_plan_bytes=0,
        profiles=tuple(
            ProfileInfo(kind=kind, sizes={"B": b, "S": s, "M": (1, 4, 50)}, activation_bytes=0)
            for kind, b, s in kinds
        ),
        pool=PoolLayout(
            dtype="Half", num_layers=1, num_kv_heads=1, block_size=BLOCK, head_dim=8, max_blocks=99
        ),
        max_context=200,
        tensors=(),
        folded_zero_points=0,
        requantized={},
        layers=(),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Up to 12 sequences, tokens numbered from 0, with any rows wanted and some trees."""
    lens = draw(st.lists(st.one_of(st.just(1), st.integers(1, 30)), min_size=1, max_size=12))
    pasts = [draw(st.integers(0, 150)) for _ in lens]
    total = sum(lens)
    rows = sorted(draw(st.sets(st.integers(0, total - 1))))
    masks = [np.eye(n, dtype=np.bool_) if n <= 5 and draw(st.booleans()) else None for n in lens]
    tables = [[100 * i + block for block in range(50)] for i in range(len(lens))]
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(pasts, lens, strict=True)])
    return Step(
        np.arange(total, dtype=np.int32),
        positions.astype(np.int32),
        np.array(pasts, np.int32),
        np.array(lens, np.int32),
        tables,
        np.array(rows, np.int32),
        masks,
    )


limits = st.builds(
    info_of, st.integers(1, 5), st.integers(5, 9), st.integers(0, 6), st.sampled_from([0, 10**4, 10**9])
)


@given(steps(), limits)
def test_every_token_is_computed_once_within_the_limits_and_after_its_past(
    step: Step, info: EngineInfo
) -> None:
    calls = list(plan_calls(step, info))
    reached = step.past_lens.copy()
    for call in calls:
        sizes = info.profiles[call.profile].sizes
        assert sizes["B"][0] <= len(call.pieces) <= sizes["B"][2]
        assert sizes["S"][0] <= max(piece.count for piece in call.pieces) <= sizes["S"][2]
        for piece in call.pieces:
            assert step.past_lens[piece.sequence] + piece.start == reached[piece.sequence]
            assert piece.num_blocks * BLOCK >= reached[piece.sequence] > (piece.num_blocks - 1) * BLOCK
            reached[piece.sequence] += piece.count
    assert np.array_equal(reached, step.past_lens + step.new_lens)


@given(steps(), limits)
def test_every_wanted_row_comes_back_to_its_place(step: Step, info: EngineInfo) -> None:
    """The token ids stand for the logits: each row has to end where its token was wanted."""
    logits = np.full(len(step.logit_rows), -1)
    for call in plan_calls(step, info):
        part, places, _ = step_of(step, call.pieces)
        batch = pad(part, range(len(call.pieces)), BLOCK, [None])
        logits[places[batch.logit_places]] = batch.token_ids.reshape(-1)[batch.logit_rows]
        assert set(batch.token_ids.reshape(-1)[batch.token_rows]) >= set(
            batch.token_ids.reshape(-1)[batch.logit_rows]
        )
    assert np.array_equal(logits, step.logit_rows)


@given(steps(), limits)
def test_growing_a_batch_hides_what_it_adds(step: Step, info: EngineInfo) -> None:
    for call in plan_calls(step, info):
        part, *_ = step_of(step, call.pieces)
        batch = pad(part, range(len(call.pieces)), BLOCK, [None])
        (sequences, tokens), blocks = batch.token_ids.shape, batch.block_tables.shape[1]
        grown = grow(batch, sequences + 2, blocks + 3, BLOCK)
        past = blocks * BLOCK
        before, after = batch.masks[None], grown.masks[None]
        assert after.shape == (sequences + 2, 1, tokens, past + 3 * BLOCK + tokens)
        assert np.array_equal(after[:sequences, ..., :past], before[..., :past])
        assert not after[:sequences, ..., past : past + 3 * BLOCK].any()
        assert np.array_equal(after[:sequences, ..., past + 3 * BLOCK :], before[..., past:])
        assert np.array_equal(after[sequences:, 0].sum(-1), np.ones((2, tokens)))
        assert np.array_equal(grown.block_tables[:sequences, :blocks], batch.block_tables)
        assert not grown.block_tables[sequences:].any()


def decode_calls(pasts: list[int], weight_bytes: int) -> list[Call]:
    count = len(pasts)
    step = Step(
        np.zeros(count, np.int32),
        np.array(pasts, np.int32),
        np.array(pasts, np.int32),
        np.ones(count, np.int32),
        [list(range(50))] * count,
        np.arange(count, dtype=np.int32),
    )
    return list(plan_calls(step, info_of(8, 9, 0, weight_bytes)))


@pytest.mark.parametrize(("weight_bytes", "num_calls"), [(10**6, 1), (2000, 2), (0, 3)])
def test_sequences_of_unlike_length_share_a_call_while_weights_cost_more_than_padding(
    weight_bytes: int, num_calls: int
) -> None:
    """128 bytes a block, three times over; pasts of 25, 24, 3 and 3 blocks, and one without."""
    calls = decode_calls([10, 100, 12, 96], weight_bytes)
    assert len(calls) == num_calls
    assert [piece.num_blocks for call in calls for piece in call.pieces] == [25, 24, 3, 3]


def test_shapes_come_again() -> None:
    assert [round_up(size, 11) for size in (1, 2, 3, 5, 8, 9, 11)] == [1, 2, 4, 8, 8, 11, 11]
