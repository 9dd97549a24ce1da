"""Drafts under a constraint: it is moved on over them and taken back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from qtool.runtime.constraint import TokenConstraint, bitmask_width


@contextmanager
def moved_on(constraint: TokenConstraint | None) -> Iterator["Walk"]:
    """A walk over drafts from where the constraint stands, to which it is taken back in the end."""
    walk = Walk(constraint)
    try:
        yield walk
    finally:
        walk.back()


class Walk:
    """Moves a constraint on, and counts by how much; without one, everything is allowed."""

    def __init__(self, constraint: TokenConstraint | None) -> None:
        self._constraint = constraint
        self._num_moved = 0

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._constraint is not None and self._constraint.finished

    def accept(self, token: int) -> None:
        """Move on by a token that is allowed."""
        if self._constraint is not None:
            self._constraint.accept(token)
            self._num_moved += 1

    def back(self) -> None:
        """To where the walk began."""
        if self._constraint is not None and self._num_moved:
            self._constraint.rollback(self._num_moved)
            self._num_moved = 0


def allowed_length(constraint: TokenConstraint, tokens: Sequence[int], vocab_size: int) -> int:
    """How many of these tokens, from the first on, the constraint allows after what it has accepted."""
    row = np.zeros(bitmask_width(vocab_size), np.int32)
    with moved_on(constraint) as walk:
        for count, token in enumerate(tokens):
            if walk.ended:
                return count
            constraint.fill_mask(row)
            if not row[token // 32] >> (token % 32) & 1:
                return count
            walk.accept(token)
    return len(tokens)
