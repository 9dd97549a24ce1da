"""Whether looking for drafts is worth its own time, where a step takes less than a millisecond."""

_SHARE = 0.003
"""Of the time, what may go into looking for drafts that bring nothing."""
_AT_START = 30
"""Looks that are paid for at the start, and that time pays for ahead at most."""
_MOST = 8
"""Those that what was saved pays for ahead: few, or what drafts save while a batch ends would pay for vain
looks through most of the next one."""
_LEAST = 1
"""Looks that are paid for later, at most."""
_MOST_TOKENS, _LEAST_STEPS = 1.0, 0.25
"""The same in a token's share of a step and in steps, where that is more: a few drafts of a lone sequence
that fail are no reason to rest, and after what lost much the next look is a while off."""
_RATE = 0.1


class Worth:
    """An account of what drafts save, and of what it takes to find them, to decide and to learn from them.

    A look that finds nothing to verify is paid from what drafts saved not long ago, and from a small share of
    the time. Beside a step of tens of milliseconds that is always enough; where a step takes a fraction of
    one and drafts are no good, nearly all steps go without a look.
    """

    def __init__(self) -> None:
        self._look_ms: float | None = None
        self._credit_ms = 0.0
        self._step_ms = self._token_ms = 0.0
        self._saved_ms = 0.0
        """By a step with drafts, lately: that one of them failed is no reason to rest."""

    @property
    def allows_look(self) -> bool:
        """Whether the next step may look for drafts."""
        return self._credit_ms >= 0

    def pass_time(self, ms: float, num_sequences: int) -> None:
        """A step of so many sequences took so long, whether it looked or not."""
        self._credit_ms += _SHARE * ms
        self._step_ms += _RATE * (ms - self._step_ms)
        self._token_ms += _RATE * (ms / num_sequences - self._token_ms)

    def looked(self, ms: float, saved_ms: float | None) -> None:
        """A step looked, which took `ms` by itself, and saved so much by the drafts that it verified; None
        where it had none."""
        if self._look_ms is None:
            self._look_ms = ms
            self._credit_ms = _AT_START * ms
        ms = min(ms, 2 * self._look_ms)  # what was held up is not usual
        self._look_ms += _RATE * (ms - self._look_ms)
        saved_most = max(_MOST * self._look_ms, _MOST_TOKENS * self._token_ms)
        most = max(_AT_START * self._look_ms, saved_most)
        least = max(_LEAST * self._look_ms, _LEAST_STEPS * self._step_ms)
        if saved_ms is not None:
            self._saved_ms += _RATE * (saved_ms - self._saved_ms)
            self._credit_ms = min(self._credit_ms + self._saved_ms, max(self._credit_ms, saved_most))
        self._credit_ms = min(max(self._credit_ms - ms, -least), most)
