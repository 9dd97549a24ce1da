"""Embeddings: the hidden states of a prompt's tokens pooled into one vector, chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.compile.hidden import FINAL, NO_HIDDEN_STATES, HiddenStates
from qtool.errors import UsageError
from qtool.runtime.engines.contract import Floats
from qtool.runtime.request import Pooling, SequenceState
from qtool.runtime.scheduler import Chunk


def refuse_without(hidden_states: HiddenStates | None) -> None:
    """Raise UsageError for an engine that does not give final hidden states."""
    if hidden_states is None or FINAL not in hidden_states.layers:
        raise UsageError(f"embeddings are pooled hidden states, and {NO_HIDDEN_STATES}")


@dataclass
class _Pool:
    """What is known of one prompt."""

    total: NDArray[np.float64]
    """Of the rows so far; the last one where that alone counts."""
    num_tokens: int = 0
    """Leading tokens that are in it."""


class Pooler:
    """Pools the hidden states of the sequences that ask for it. Used by the loop's thread."""

    def __init__(self, hidden_states: HiddenStates | None) -> None:
        self._hidden_states = hidden_states
        self._pools: dict[int, _Pool] = {}

    def add(self, chunk: Chunk, hidden: Floats) -> Floats | None:
        """Take in the hidden states [num_new, width] of a chunk that is about to be committed; the finished
        vector [hidden], of length 1, if it was the last.

        A sequence that is computed again after it gave up its blocks brings nothing new until it is where it
        was.
        """
        assert self._hidden_states is not None
        sequence = chunk.sequence
        rows = hidden[:, self._hidden_states.columns(FINAL)].astype(np.float64)
        end = sequence.num_computed + chunk.num_new
        pool = self._pools.setdefault(sequence.id, _Pool(np.zeros(rows.shape[1])))
        new = rows[max(pool.num_tokens - sequence.num_computed, 0) :]
        if len(new):
            pool.total = pool.total + new.sum(0) if _pooling(sequence) == "mean" else new[-1]
            pool.num_tokens = end
        if not chunk.reaches_end:
            return None
        vector = pool.total / max(float(np.linalg.norm(pool.total)), 1e-12)
        return vector.astype(np.float32)

    def forget(self, sequence: SequenceState) -> None:
        """Drop what is known of a sequence."""
        self._pools.pop(sequence.id, None)


def _pooling(sequence: SequenceState) -> Pooling | None:
    return sequence.options.pooling


def is_pooled(chunks: Sequence[Chunk]) -> bool:
    """Whether a step has a sequence that wants hidden states pooled."""
    return any(_pooling(chunk.sequence) is not None for chunk in chunks)
