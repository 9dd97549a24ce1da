"""What the runtime asks of an engine: run one ragged step over the block pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """A ragged batch of B sequences with T new tokens in all, laid one sequence after another.

    A sequence's new tokens may be a chunk of its prompt, one decoded token, or K drafts to verify. Its
    `past_lens` tokens are already in the pool; the engine writes the keys and values of its new tokens to
    the slots that follow, in the blocks that its table names.
    """

    token_ids: Ints
    """[T]"""
    positions: Ints
    """[T], the position of each new token in its sequence."""
    past_lens: Ints
    """[B]"""
    new_lens: Ints
    """[B], summing to T; none is 0."""
    block_tables: Sequence[Sequence[int]]
    """B tables of block numbers, each long enough for past and new tokens; longer is allowed."""
    logit_rows: Ints
    """[R], rows of T whose logits are wanted, ascending."""


class Engine(Protocol):
    """Drives one compiled model. Not thread-safe: one step at a time."""

    vocab_size: int
    max_context: int
    """Tokens that the model's positions allow in one sequence."""
    block_size: int
    """Tokens a block holds."""
    num_blocks: int
    """Blocks in the pool."""

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows. The pool is written, nothing else changes."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer (copy-on-write)."""
        ...
