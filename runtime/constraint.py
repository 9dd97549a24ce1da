"""What restricts a sequence's next token: the seam between the loop and grammars."""

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

Bitmask = NDArray[np.int32]
"""One row [ceil(V / 32)] over the engine's vocabulary: bit t % 32 of word t // 32, the least significant bit
first, is 1 where token t is allowed. Structured-output libraries fill the same layout."""


class TokenConstraint(Protocol):
    """Follows one sequence, token by token; made for it alone, and called in the engine loop's thread."""

    @property
    def finished(self) -> bool:
        """Whether no token may follow what was accepted: the sequence ends with reason "stop"."""
        ...

    def fill_mask(self, row: Bitmask) -> None:
        """Write every bit of the row: what may come next. An end-of-sequence token is allowed exactly where
        the text may end; a token beyond the tokenizer's vocabulary never is."""
        ...

    def accept(self, token: int) -> None:
        """Move on by one token of the sequence, one that the mask allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted: drafts that the model rejected."""
        ...


ConstraintFactory = Callable[[], TokenConstraint]
"""Makes the constraint of one choice, in the caller's thread, and must be quick: compile the grammar before.
Choices of one request can't share a constraint, since each follows its own text."""


class GuardedConstraint:
    """A constraint that may fail in any of its calls, and allows no token from then on: its sequence fails,
    and no other, for the loop's thread is everyone's."""

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint
        self.failure: str | None = None
        """What it failed of; None while it works."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete; a failed constraint doesn't know."""
        finished = False

        def ask() -> None:
            nonlocal finished
            finished = self._constraint.finished

        self._try(ask)
        return finished

    def fill_mask(self, row: Bitmask) -> None:
        """Write what may come next: nothing after a failure."""
        self._try(lambda: self._constraint.fill_mask(row))
        if self.failure is not None:
            row[:] = 0

    def accept(self, token: int) -> None:
        """Move on by a token."""
        self._try(lambda: self._constraint.accept(token))

    def rollback(self, num_tokens: int) -> None:
        """Take back tokens."""
        self._try(lambda: self._constraint.rollback(num_tokens))

    def _try(self, call: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            call()
        except BaseException as error:  # a panic in a library's Rust is no Exception
            _log.error("a grammar fails", exc_info=error)
            self.failure = f"the request's grammar failed: {type(error).__name__}: {error}"


def bitmask_width(vocab_size: int) -> int:
    """Words in a row over `vocab_size` tokens."""
    return -(-vocab_size // 32)


def allowed_tokens(row: Bitmask, vocab_size: int) -> NDArray[np.bool_]:
    """The row as one truth value a token [V]."""
    return np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
