"""Steps for engines, and the ways of running the same tokens: at once, in chunks, in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Engine, Floats, Step


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence that has `past` tokens in the blocks of `table`."""

    tokens: Sequence[int]
    past: int
    table: Sequence[int]


def step_of(*chunks: Chunk, rows: Sequence[int] | None = None) -> Step:
    """One ragged step; logits of every row unless `rows` says which."""
    total = sum(len(chunk.tokens) for chunk in chunks)
    return Step(
        token_ids=_ints([token for chunk in chunks for token in chunk.tokens]),
        positions=np.concatenate(
            [np.arange(chunk.past, chunk.past + len(chunk.tokens), dtype=np.int32) for chunk in chunks]
        ),
        past_lens=_ints([chunk.past for chunk in chunks]),
        new_lens=_ints([len(chunk.tokens) for chunk in chunks]),
        block_tables=[chunk.table for chunk in chunks],
        logit_rows=_ints(range(total) if rows is None else rows),
    )


def in_chunks(engine: Engine, tokens: Sequence[int], table: Sequence[int], sizes: Sequence[int]) -> Floats:
    """The logits of every token, run in chunks of the given sizes, the last size repeated."""
    logits, past, turn = [], 0, 0
    while past < len(tokens):
        size = sizes[min(turn, len(sizes) - 1)]
        logits.append(engine.run(step_of(Chunk(tokens[past : past + size], past, table))))
        past, turn = past + size, turn + 1
    return np.concatenate(logits)


def difference(logits: Floats, wanted: Floats) -> float:
    """The largest difference, relative to the largest logit."""
    assert logits.shape == wanted.shape
    return float(np.abs(logits - wanted).max() / np.abs(wanted).max())


def _ints(values: Sequence[int] | range) -> np.ndarray:
    return np.asarray(list(values), dtype=np.int32)
