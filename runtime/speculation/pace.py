"""How long drafting takes, going by how long it took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_RATE = 0.1
_FIRST_MS = 1.0
"""A token is said to take, before any was drafted."""


class Pace:
    """Milliseconds for each token of a draft's depth, over recent calls."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ms: float | None = None

    @contextmanager
    def measuring(self, depth: int) -> Iterator[None]:
        """Time what drafts `depth` tokens."""
        start = self._clock()
        yield
        ms = (self._clock() - start) * 1000 / depth
        self._ms = ms if self._ms is None else self._ms + _RATE * (ms - self._ms)

    def expected_ms(self, depth: int) -> float:
        """Milliseconds that drafting `depth` tokens should take."""
        return depth * (_FIRST_MS if self._ms is None else self._ms)
