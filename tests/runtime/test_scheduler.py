"""The scheduler, driven by random arrivals, lengths and cancellations over tiny pools."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import UsageError
from qtool.runtime.blocks import BlockManager
from qtool.runtime.request import ParameterError, SamplingParams, SequenceState
from qtool.runtime.scheduler import Chunk, Scheduler, SchedulerConfig


def make(num_blocks: int = 8, block_size: int = 4, seqs: int = 4, budget: int = 16) -> Scheduler:
    return Scheduler(SchedulerConfig(seqs, budget), BlockManager(num_blocks, block_size), max_context=64)


def sequence(number: int, num_prompt: int, max_tokens: int = 8) -> SequenceState:
    return SequenceState(number, [1] * num_prompt, SamplingParams(max_tokens=max_tokens))


def run(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Run one step as the loop does; (sequence, tokens computed) for each chunk."""
    chunks = scheduler.schedule()
    report = [(chunk.sequence.id, chunk.num_new) for chunk in chunks]
    for chunk in chunks:
        _commit(scheduler, chunk)
    return report


def _commit(scheduler: Scheduler, chunk: Chunk) -> None:
    state, ends = chunk.sequence, chunk.reaches_end
    state.num_computed += chunk.num_new
    if ends:
        state.tokens.append(1)
        if state.finish_reason() is not None:
            scheduler.remove(state)


def test_a_long_prompt_is_cut_into_chunks_beside_decoding_sequences() -> None:
    scheduler = make(num_blocks=16, budget=10)
    scheduler.add(sequence(0, 3))
    assert run(scheduler) == [(0, 3)]
    scheduler.add(sequence(1, 25))
    assert [run(scheduler) for _ in range(4)] == [
        [(0, 1), (1, 9)],
        [(0, 1), (1, 9)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 1)],
    ]


def test_waiting_sequences_start_in_order_of_arrival_within_the_limits() -> None:
    scheduler = make(num_blocks=16, seqs=2, budget=16)
    for number in (2, 0, 1):
        scheduler.add(sequence(number, 5))
    assert run(scheduler) == [(0, 5), (1, 5)]
    assert [state.id for state in scheduler.waiting] == [2]


def test_the_last_arrived_gives_up_its_blocks_and_is_computed_again() -> None:
    scheduler = make(num_blocks=4, block_size=4)
    scheduler.add(sequence(0, 8))
    scheduler.add(sequence(1, 7))
    assert run(scheduler) == [(0, 8), (1, 7)]
    assert run(scheduler) == [(0, 1)]  # 0 needs a third block, which only 1 can give
    assert scheduler.num_preemptions == 1
    assert [state.id for state in scheduler.waiting] == [1]
    assert scheduler.waiting[0].num_computed == 0
    assert len(scheduler.waiting[0].tokens) == 8
    for _ in range(6):
        assert run(scheduler) == [(0, 1)]
    assert run(scheduler) == [(1, 8)]


def test_a_request_that_can_never_fit_is_refused_with_the_limit_it_breaks() -> None:
    scheduler = make(num_blocks=8, block_size=4)
    with pytest.raises(ParameterError, match=r"30 tokens and 8 more make 38, but the KV cache holds 32"):
        scheduler.add(sequence(0, 30, max_tokens=8))
    roomy = make(num_blocks=100, block_size=4)
    with pytest.raises(ParameterError, match=r"the model's context is 64 tokens"):
        roomy.add(sequence(0, 60, max_tokens=5))
    with pytest.raises(ParameterError, match="prompt: is empty"):
        scheduler.add(sequence(0, 0))
    roomy.add(sequence(1, 60, max_tokens=4))


def test_a_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(UsageError, match="max_num_batched_tokens 3 is below max_num_seqs 4"):
        SchedulerConfig(4, 3)


arrivals = st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 12))
"""Steps after the one before, prompt tokens, max_tokens."""


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=16),
    cancelled=st.dictionaries(st.integers(0, 15), st.integers(0, 60)),
    num_blocks=st.integers(8, 20),
    block_size=st.integers(1, 5),
    seqs=st.integers(1, 5),
    spare_budget=st.integers(0, 12),
)
def test_every_request_ends_blocks_add_up_and_limits_hold(
    requests: list[tuple[int, int, int]],
    cancelled: dict[int, int],
    num_blocks: int,
    block_size: int,
    seqs: int,
    spare_budget: int,
) -> None:
    scheduler = make(num_blocks, block_size, seqs, seqs + spare_budget)
    pending, clock = [], 0
    for number, (gap, num_prompt, max_tokens) in enumerate(requests):
        clock += gap
        fits = num_prompt + max_tokens <= num_blocks * block_size
        if fits:
            pending.append((clock, sequence(number, num_prompt, max_tokens)))
    alive: dict[int, SequenceState] = {}
    # Alone, a request takes its tokens in steps at most; preemption may repeat all of them per competitor.
    bound = clock + 40 * sum(tokens + answer for _, tokens, answer in requests)
    for now in range(bound):
        while pending and pending[0][0] <= now:
            state = pending.pop(0)[1]
            alive[state.id] = state
            scheduler.add(state)
        for number in [number for number, when in cancelled.items() if when <= now and number in alive]:
            scheduler.remove(alive.pop(number))
        if not alive and not pending:
            break
        chunks = scheduler.schedule()
        assert bool(chunks) == bool(alive)
        _check(scheduler, chunks, list(alive.values()))
        for chunk in chunks:
            _commit(scheduler, chunk)
            if chunk.sequence.finish_reason() is not None and not chunk.sequence.block_table:
                del alive[chunk.sequence.id]
    assert not alive
    assert not pending
    assert scheduler.blocks.num_free == num_blocks


def _check(scheduler: Scheduler, chunks: list[Chunk], alive: list[SequenceState]) -> None:
    assert sum(chunk.num_new for chunk in chunks) <= scheduler.config.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    order = [state.id for state in scheduler.running + scheduler.waiting]
    assert order == sorted(state.id for state in alive)
    named = [block for state in alive for block in state.block_table]
    assert len(named) == len(set(named)), "a block belongs to two sequences"
    assert scheduler.blocks.num_free + len(named) == scheduler.blocks.num_blocks
    assert all(not state.block_table for state in scheduler.waiting)
    for chunk in chunks:
        state = chunk.sequence
        assert 0 < chunk.num_new <= state.num_uncomputed
        room = len(state.block_table) * scheduler.blocks.block_size
        assert state.num_computed + chunk.num_new <= room
