"""Step times of an engine, measured before it serves."""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Engine, Step
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.steptime import StepLoad

_REPEATS = 2
_CHANGES = 10
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class _Shape:
    """A step of alike sequences."""

    num_sequences: int
    past: int
    new: int
    num_logits: int = 1
    """Of each sequence's last tokens."""


def measure_step_times(engine: Engine, config: SchedulerConfig) -> list[tuple[StepLoad, float]]:
    """Loads and their milliseconds: prompts' chunks and batches that decode, with little context and much.

    Takes some tens of steps. Each shape is run once to warm up and counts with its best time afterwards. The
    pool is overwritten, so nothing may be in it.
    """
    return _measure(engine, _shapes(engine, config))


def measure_verify_times(engine: Engine, most: int) -> list[tuple[StepLoad, float]]:
    """Loads and their milliseconds by the number of rows, up to `most` and all with logits, of one sequence:
    what verifying drafts costs. Takes and overwrites what `measure_step_times` does."""
    counts = [rows for rows in _ROWS if rows <= most]
    shapes = [_Shape(1, past, rows, rows) for past in (0, 512) for rows in counts if past == 0 or rows == 8]
    return _measure(engine, (shape for shape in shapes if _fits(shape, engine)))


def measure_change_ms(engine: Engine) -> float:
    """Milliseconds that a step takes more when its number of rows is not that of the step before: OpenVINO
    prepares every node of its graph anew, which is 3.5 ms of SmolLM2's 13 in 16 bits. 0 where it makes no
    difference. Overwrites what `measure_step_times` does."""
    steps = [_step(_Shape(1, 0, rows, rows), engine) for rows in (1, 2)]

    def ms(which: Iterable[int]) -> float:
        times = []
        for place in which:
            start = time.perf_counter()
            engine.run(steps[place])
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times[2:])

    steady = max(ms([0] * _CHANGES), ms([1] * _CHANGES))
    return max(ms([0, 1] * (_CHANGES // 2)) - steady, 0.0)


def _measure(engine: Engine, shapes: Iterable[_Shape]) -> list[tuple[StepLoad, float]]:
    measured = []
    for shape in shapes:
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
    yield from (shape for shape in wanted if _fits(shape, engine))


def _fits(shape: _Shape, engine: Engine) -> bool:
    tokens = shape.past + shape.new
    blocks = shape.num_sequences * -(-tokens // engine.block_size)
    return tokens <= engine.max_context and blocks <= engine.num_blocks


def _step(shape: _Shape, engine: Engine) -> Step:
    per_sequence = -(-(shape.past + shape.new) // engine.block_size)
    count = shape.num_sequences
    ends = np.arange(shape.new, count * shape.new + 1, shape.new)
    return Step(
        token_ids=np.zeros(count * shape.new, np.int32),
        positions=np.tile(np.arange(shape.past, shape.past + shape.new, dtype=np.int32), count),
        past_lens=np.full(count, shape.past, np.int32),
        new_lens=np.full(count, shape.new, np.int32),
        block_tables=np.arange(count * per_sequence).reshape(count, per_sequence).tolist(),
        logit_rows=(ends[:, None] - np.arange(shape.num_logits, 0, -1)).ravel().astype(np.int32),
    )
