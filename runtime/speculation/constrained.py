"""Drafts under a constraint: it is moved on over them and taken back."""

from collections.abc import Sequence

import numpy as np

from qtool.runtime.constraint import TokenConstraint, allowed_tokens, bitmask_width


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
    walk = Walk(constraint)
    count = 0
    while count < len(tokens) and not walk.ended:
        constraint.fill_mask(row)
        if not allowed_tokens(row, vocab_size)[tokens[count]]:
            break
        walk.accept(tokens[count])
        count += 1
    walk.back()
    return count
