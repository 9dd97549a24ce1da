"""The scheduler, driven by random arrivals, lengths and cancellations over tiny pools."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import UsageError
from qtool.runtime.blocks import BlockManager
from qtool.runtime.request import ParameterError, RequestOptions, SamplingParams, SequenceState
from qtool.runtime.scheduler import Chunk, Plan, Scheduler, SchedulerConfig
from qtool.runtime.slo import Pacer, Slo
from qtool.runtime.steptime import StepLoad, StepTimeModel


def make(num_blocks: int = 8, block_size: int = 4, seqs: int = 4, budget: int = 16) -> Scheduler:
    return Scheduler(SchedulerConfig(seqs, budget), BlockManager(num_blocks, block_size), max_context=64)


def sequence(number: int, num_prompt: int, max_tokens: int = 8) -> SequenceState:
    """A sequence whose prompt begins as no other's does."""
    prompt = [-number, *[1] * (num_prompt - 1)] if num_prompt else []
    return SequenceState(number, prompt, SamplingParams(max_tokens=max_tokens))


def run(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Run one step as the loop does; (sequence, tokens computed) for each chunk."""
    chunks = scheduler.schedule().chunks
    report = [(chunk.sequence.id, chunk.num_new) for chunk in chunks]
    _commit(scheduler, chunks)
    return report


def _commit(scheduler: Scheduler, chunks: list[Chunk]) -> list[SequenceState]:
    """Append a token to each sequence that reached its end; those that finished by it are removed."""
    ended = [chunk.sequence for chunk in chunks if chunk.reaches_end]
    scheduler.commit(chunks)
    for state in ended:
        state.tokens.append(100 * state.id + len(state.tokens))
    finished = [state for state in ended if state.finish_reason() is not None]
    for state in finished:
        scheduler.remove(state)
    return finished


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


@dataclass(frozen=True)
class Arrival:
    """A request of the random history; those of a family begin alike."""

    gap: int
    """Steps after the one before."""
    num_prompt: int
    max_tokens: int
    family: int
    salt: str
    n: int
    priority: int = 0

    def sequences(self, first_id: int) -> list[SequenceState]:
        params = SamplingParams(max_tokens=self.max_tokens, n=self.n)
        options = RequestOptions(cache_salt=self.salt, priority=self.priority)
        prompt = [self.family] * self.num_prompt
        first = SequenceState(first_id, list(prompt), params, options)
        rest = [
            SequenceState(first_id + choice, list(prompt), params, options, first, choice)
            for choice in range(1, self.n)
        ]
        return [first, *rest]


arrivals = st.builds(
    Arrival,
    gap=st.integers(0, 6),
    num_prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 12),
    family=st.integers(-2, -1),
    salt=st.sampled_from(["", "salt"]),
    n=st.sampled_from([1, 1, 1, 3]),
    priority=st.sampled_from([0, 0, -1, 5]),
)


class Pool:
    """What the blocks hold, token by token, as an engine would write it."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.slots = [[0] * blocks.block_size for _ in range(blocks.num_blocks)]

    def run(self, plan: Plan) -> None:
        """Copy and write as an engine does, and check that everything before is what it should be."""
        size = self.blocks.block_size
        for source, target in plan.copies:
            self.slots[target] = list(self.slots[source])
        for chunk in plan.chunks:
            state, end = chunk.sequence, chunk.sequence.num_computed + chunk.num_new
            for place in range(state.num_computed, end):
                block = state.block_table[place // size]
                assert self.blocks.num_references(block) == 1, "a block to write to is shared"
                self.slots[block][place % size] = state.tokens[place]
        for chunk in plan.chunks:
            state, end = chunk.sequence, chunk.sequence.num_computed + chunk.num_new
            held = [token for block in state.block_table for token in self.slots[block]]
            assert held[:end] == state.tokens[:end]


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=1, max_size=12),
    cancelled=st.dictionaries(st.integers(0, 15), st.integers(0, 60)),
    num_blocks=st.integers(8, 20),
    block_size=st.integers(1, 5),
    seqs=st.integers(1, 5),
    spare_budget=st.integers(0, 12),
    prefix_caching=st.booleans(),
    tpot_ms=st.sampled_from([None, 0.1, 3.0]),
)
def test_every_request_ends_blocks_add_up_and_limits_hold(
    requests: list[Arrival],
    cancelled: dict[int, int],
    num_blocks: int,
    block_size: int,
    seqs: int,
    spare_budget: int,
    prefix_caching: bool,
    tpot_ms: float | None,
) -> None:
    blocks = BlockManager(num_blocks, block_size)
    scheduler = Scheduler(SchedulerConfig(seqs, seqs + spare_budget, prefix_caching), blocks, max_context=64)
    if tpot_ms is not None:
        sweep = [(StepLoad(tokens, tokens, 1), 1 + 0.2 * tokens) for tokens in (1, 4, 16)]
        scheduler.pacer = Pacer(Slo(tpot_ms=tpot_ms), StepTimeModel(sweep))
    pool = Pool(blocks)
    pending: list[tuple[int, SequenceState]] = []
    clock = 0
    for request in requests:
        clock += request.gap
        if request.num_prompt + request.max_tokens <= num_blocks * block_size:
            pending += [(clock, state) for state in request.sequences(len(pending))]
    alive: dict[int, SequenceState] = {}
    # Alone, a request takes its tokens in steps at most; preemption may repeat all of them per competitor.
    bound = clock + 120 * sum(request.num_prompt + request.max_tokens for request in requests)
    for now in range(bound):
        while pending and pending[0][0] <= now:
            state = pending.pop(0)[1]
            alive[state.id] = state
            scheduler.add(state)
        for number in [number for number, when in cancelled.items() if when <= now and number in alive]:
            scheduler.remove(alive.pop(number))
        if not alive and not pending:
            break
        plan = scheduler.schedule()
        assert bool(plan.chunks) == bool(alive)
        _check(scheduler, plan.chunks, list(alive.values()))
        pool.run(plan)
        for state in _commit(scheduler, plan.chunks):
            del alive[state.id]
    assert not alive
    assert not pending
    assert blocks.num_free == num_blocks


def _check(scheduler: Scheduler, chunks: list[Chunk], alive: list[SequenceState]) -> None:
    assert sum(chunk.num_new for chunk in chunks) <= scheduler.config.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    for part in (scheduler.running, scheduler.waiting):
        ranks = [(state.options.priority, state.id) for state in part]
        assert ranks == sorted(ranks)
    assert {*scheduler.running, *scheduler.waiting} == set(alive)
    named = {block for state in alive for block in state.block_table}
    assert scheduler.blocks.num_free + len(named) == scheduler.blocks.num_blocks
    assert all(not state.block_table for state in scheduler.waiting)
    for chunk in chunks:
        state = chunk.sequence
        assert 0 < chunk.num_new <= state.num_uncomputed
        room = len(state.block_table) * scheduler.blocks.block_size
        assert state.num_computed + chunk.num_new <= room


def test_a_prompt_that_was_computed_is_not_computed_again_but_for_its_last_token() -> None:
    scheduler = make(num_blocks=16, budget=64)
    prompt = list(range(1, 13))
    for number in (0, 1):
        scheduler.add(SequenceState(number, list(prompt), SamplingParams(max_tokens=1)))
        plan = scheduler.schedule()
        _commit(scheduler, plan.chunks)
        assert [chunk.num_new for chunk in plan.chunks] == [12 if number == 0 else 1]
        assert len(plan.copies) == number  # the last block is written to, so a copy of it
    assert (scheduler.num_hit_tokens, scheduler.num_queried_tokens) == (11, 24)


def test_another_salt_or_no_caching_computes_a_prompt_again() -> None:
    for caching, salt in ((True, "other"), (False, "")):
        scheduler = Scheduler(SchedulerConfig(4, 64, caching), BlockManager(16, 4), max_context=64)
        for number, own in enumerate(["", salt]):
            options = RequestOptions(cache_salt=own)
            scheduler.add(SequenceState(number, [7] * 9, SamplingParams(max_tokens=1), options))
            assert run(scheduler) == [(number, 9)]


def test_choices_wait_for_the_first_ones_prompt_and_take_it_over() -> None:
    scheduler = make(num_blocks=32, seqs=4, budget=8)
    for state in Arrival(0, num_prompt=14, max_tokens=3, family=-1, salt="", n=3).sequences(0):
        scheduler.add(state)
    assert run(scheduler) == [(0, 8)]
    assert run(scheduler) == [(0, 6)]
    assert run(scheduler) == [(0, 1), (1, 1), (2, 1)]
    assert scheduler.blocks.num_free == 32 - (3 + 3 * 1)  # three full blocks shared, one of each one's own


def test_a_lower_priority_number_runs_first_and_is_preempted_last() -> None:
    scheduler = make(num_blocks=4, seqs=2, block_size=4)
    for number, priority in enumerate([5, 0, 1]):
        params, options = SamplingParams(max_tokens=4), RequestOptions(priority=priority)
        scheduler.add(SequenceState(number, [-number, *[1] * 7], params, options))
    assert run(scheduler) == [(1, 8), (2, 8)]
    assert run(scheduler) == [(1, 1)]
    assert [state.id for state in scheduler.waiting] == [2, 0]


def test_a_long_prompt_that_runs_first_leaves_a_token_for_those_that_decode() -> None:
    scheduler = make(num_blocks=40, seqs=4, budget=8)
    scheduler.add(sequence(1, 3))
    assert run(scheduler) == [(1, 3)]
    scheduler.add(sequence(0, 20))  # as after a preemption: it arrived first
    assert run(scheduler) == [(1, 1), (0, 7)]
    assert run(scheduler) == [(0, 7), (1, 1)]
