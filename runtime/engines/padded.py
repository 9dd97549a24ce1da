"""Ragged steps as rectangular batches, for graphs that take [B, S] tokens over [B, M] blocks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Bools, Ints, Step, slots_of


@dataclass(frozen=True)
class PaddedBatch:
    """Some sequences of a step, each padded to S new tokens over M blocks of past.

    The arrays are what the graphs of ``qtool.compile.backends.onnx`` take. A padding token sees itself
    alone, and padding blocks are block 0, which no token sees.
    """

    token_ids: Ints
    """[B, S]"""
    positions: Ints
    """[B, S]"""
    block_tables: Ints
    """[B, M]"""
    masks: dict[int | None, Bools]
    """By sliding window, [B, 1, S, P + S]: which past slots and new tokens each new token sees."""
    logit_rows: Ints
    """[R'], the wanted rows among the B·S, row-major."""
    logit_places: Ints
    """[R'], where those rows' logits belong among the R of the step."""
    hidden_rows: Ints
    """[F'], the rows whose hidden states are wanted, as `logit_rows`."""
    hidden_places: Ints
    """[F'], where those belong among the F of the step."""
    token_rows: Ints
    """[T'], the rows among the B·S that are tokens and no padding."""
    slots: Ints
    """[T'], the pool's slots that the keys and values of those tokens go to."""


def by_length(step: Step) -> Iterator[Sequence[int]]:
    """The sequences of a step with equally many new tokens, together: nothing is padded with tokens."""
    for length in np.unique(step.new_lens):
        yield np.flatnonzero(step.new_lens == length).tolist()


def pad(step: Step, sequences: Sequence[int], block_size: int, windows: Iterable[int | None]) -> PaddedBatch:
    """`sequences` of a step as one rectangle, with a mask for each of the model's `windows`."""
    past_lens, new_lens = step.past_lens[sequences], step.new_lens[sequences]
    num_new = int(new_lens.max())
    num_blocks = max(1, -(-int(past_lens.max()) // block_size))  # a dimension of 0 is one too many for some
    shape = (len(sequences), num_new)
    token_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    tables = np.zeros((len(sequences), num_blocks), np.int32)
    visible = np.zeros((*shape, num_blocks * block_size + num_new), np.bool_)
    starts = np.cumsum(step.new_lens) - step.new_lens
    token_rows, slots = [], []
    for row, sequence in enumerate(sequences):
        past, new, table = int(past_lens[row]), int(new_lens[row]), step.block_tables[sequence]
        tokens = slice(starts[sequence], starts[sequence] + new)
        token_ids[row, :new], positions[row, :new] = step.token_ids[tokens], step.positions[tokens]
        used = -(-past // block_size)
        tables[row, :used] = table[:used]
        visible[row, :, :past] = True
        visible[row, :, -num_new:] = np.eye(num_new, dtype=np.bool_)
        visible[row, :new, -num_new:][:, :new] = step.mask(sequence)
        token_rows.append(row * num_new + np.arange(new, dtype=np.int32))
        slots.append(slots_of(table, np.arange(past, past + new, dtype=np.int32), block_size))
    return PaddedBatch(
        token_ids,
        positions,
        tables,
        {window: _within(window, visible, positions)[:, None] for window in windows},
        *_wanted(step.logit_rows, sequences, starts, num_new),
        *_wanted(_NONE if step.hidden_rows is None else step.hidden_rows, sequences, starts, num_new),
        np.concatenate(token_rows),
        np.concatenate(slots),
    )


def _within(window: int | None, visible: Bools, positions: Ints) -> Bools:
    """`visible` [B, S, P + S] less what is further back than the window; a past slot is its position."""
    if window is None:
        return visible
    num_past = visible.shape[2] - positions.shape[1]
    past = np.broadcast_to(np.arange(num_past, dtype=np.int32), (len(positions), num_past))
    age = positions[:, :, None] - np.concatenate([past, positions], axis=1)[:, None]
    recent: Bools = visible & (age < window)
    return recent


_NONE = np.empty(0, np.int32)


def _wanted(wanted: Ints, sequences: Sequence[int], starts: Ints, num_new: int) -> tuple[Ints, Ints]:
    """Those of the `wanted` rows that lie in `sequences`: as rows of the rectangle, and their places."""
    owner = np.searchsorted(starts, wanted, side="right") - 1
    row_of = np.full(len(starts), -1, np.int32)
    row_of[sequences] = np.arange(len(sequences), dtype=np.int32)
    places = np.flatnonzero(row_of[owner] >= 0).astype(np.int32)
    owner = owner[places]
    rows = row_of[owner] * num_new + wanted[places] - starts[owner]
    return rows.astype(np.int32), places
