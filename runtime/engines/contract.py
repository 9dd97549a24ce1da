"""What the runtime asks of an engine: run one ragged step over the block pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qtool.compile.hidden import NO_HIDDEN_STATES, HiddenStates
from qtool.errors import QtoolError

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """A ragged batch of B sequences with T new tokens in all, laid one sequence after another.

    A sequence's new tokens may be a chunk of its prompt, one decoded token, or drafts to verify: a chain or
    a tree. Its `past_lens` tokens are already in the pool; the engine writes the keys and values of its new
    tokens to the slots that follow, in the order of the step, in the blocks that its table names.

    Nothing has to be undone after drafts are rejected: tokens beyond the `past_lens` of the next step do not
    exist. A chain's accepted drafts are where they belong; the accepted path of a tree is moved together by
    `Engine.move_slots` before the next step.
    """

    token_ids: Ints
    """[T]"""
    positions: Ints
    """[T], the position of each new token in its sequence; in a tree, past length plus depth."""
    past_lens: Ints
    """[B]"""
    new_lens: Ints
    """[B], summing to T; none is 0."""
    block_tables: Sequence[Sequence[int]]
    """B tables of block numbers, each long enough for past and new tokens; longer is allowed."""
    logit_rows: Ints
    """[R], rows of T whose logits are wanted, ascending."""
    masks: Sequence[Bools | None] | None = None
    """B masks [new, new]: which of its sequence's new tokens (columns) a new token (row) sees. Each sees
    itself, and none that comes after it. None, for all or for one sequence, is causal: all before it too."""
    hidden_rows: Ints | None = None
    """[F], rows of T whose hidden states are wanted, ascending; None is none."""

    def mask(self, sequence: int) -> Bools:
        """Which of its new tokens each new token of a sequence sees, [new, new]."""
        mask = None if self.masks is None else self.masks[sequence]
        return np.tri(self.new_lens[sequence], dtype=np.bool_) if mask is None else mask


@dataclass(frozen=True)
class StepResult:
    """What a step gives."""

    logits: Floats
    """[R, V], of its logit rows."""
    hidden: Floats
    """[F, width], of its hidden rows: the layers that the engine was compiled for, side by side."""


def wanted_hidden_rows(step: Step, hidden_states: HiddenStates | None) -> Ints:
    """The step's hidden rows, [F]; QtoolError when there are some and the engine gives none."""
    rows = np.empty(0, np.int32) if step.hidden_rows is None else step.hidden_rows
    if len(rows) and hidden_states is None:
        raise QtoolError(NO_HIDDEN_STATES)
    return rows


def slots_of(table: Sequence[int], places: Ints, block_size: int) -> Ints:
    """The pool's slots that hold the tokens at `places` of a sequence: block · block_size + offset."""
    blocks = np.asarray(table, np.int32)[places // block_size]
    return np.asarray(blocks * block_size + places % block_size, np.int32)


class Engine(Protocol):
    """Drives one compiled model. Not thread-safe: one step at a time."""

    vocab_size: int
    max_context: int
    """Tokens that the model's positions allow in one sequence."""
    block_size: int
    """Tokens a block holds."""
    num_blocks: int
    """Blocks in the pool."""
    hidden_states: HiddenStates | None
    """What it gives of a token beside logits; None: nothing."""
    takes_trees: bool
    """Whether a step may have masks and slots can be moved; else both raise QtoolError."""

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows. The pool is written, nothing else changes."""
        ...

    def run_with_hidden(self, step: Step) -> StepResult:
        """Run one step; logits and hidden states of the wanted rows. Raises QtoolError when the latter are
        wanted and the engine was compiled without."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer (copy-on-write)."""
        ...

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy keys and values from the slots `sources` to `targets`, every layer, as if all were read first.

        Slots are numbered over the whole pool, see `slots_of`; one call does for all sequences of a step.
        """
        ...
