"""Step times of an engine, measured before it serves."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Engine, Step
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.steptime import StepLoad

_REPEATS = 2


@dataclass(frozen=True)
class _Shape:
    """A step of alike sequences."""

    num_sequences: int
    past: int
    new: int


def measure_step_times(engine: Engine, config: SchedulerConfig) -> list[tuple[StepLoad, float]]:
    """Loads and their milliseconds: prompts' chunks and batches that decode, with little context and much.

    Takes some tens of steps. Each shape is run once to warm up and counts with its best time afterwards. The
    pool is overwritten, so nothing may be in it.
    """
    measured = []
    for shape in _shapes(engine, config):
        step, load = _step(shape, engine), StepLoad()
        for _ in range(shape.num_sequences):
            load = load.plus(shape.past, shape.new)
        engine.run(step)
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            engine.run(step)
            times.append(time.perf_counter() - start)
        measured.append((load, 1000 * min(times)))
    return measured


def _shapes(engine: Engine, config: SchedulerConfig) -> Iterator[_Shape]:
    """Shapes that the engine's context and pool and the limits of a step have room for."""
    batches = [1, *(count for count in (4, 16, 64) if count < config.max_num_seqs), config.max_num_seqs]
    chunks = [size for size in (16, 64, 256) if size < config.max_num_batched_tokens]
    wanted = [_Shape(count, past, 1) for count in batches for past in (0, 256)]
    wanted += [_Shape(1, past, new) for new in (*chunks, config.max_num_batched_tokens) for past in (0, 512)]
    for shape in wanted:
        tokens = shape.past + shape.new
        blocks = shape.num_sequences * -(-tokens // engine.block_size)
        if tokens <= engine.max_context and blocks <= engine.num_blocks:
            yield shape


def _step(shape: _Shape, engine: Engine) -> Step:
    per_sequence = -(-(shape.past + shape.new) // engine.block_size)
    count = shape.num_sequences
    return Step(
        token_ids=np.zeros(count * shape.new, np.int32),
        positions=np.tile(np.arange(shape.past, shape.past + shape.new, dtype=np.int32), count),
        past_lens=np.full(count, shape.past, np.int32),
        new_lens=np.full(count, shape.new, np.int32),
        block_tables=np.arange(count * per_sequence).reshape(count, per_sequence).tolist(),
        logit_rows=np.arange(shape.new - 1, count * shape.new, shape.new, dtype=np.int32),
    )
