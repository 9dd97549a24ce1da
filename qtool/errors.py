"""Errors meant for the person at the terminal: what, where, got, wanted, and the next step."""

import difflib
from collections.abc import Iterable


class QtoolError(Exception):
    """Something failed for a reason that the message explains; ends the command with exit code 1."""

    exit_code = 1


class UsageError(QtoolError):
    """The command line, a recipe or a request asks for something that cannot be; exit code 2."""

    exit_code = 2


class GateError(QtoolError):
    """A quality gate of the recipe or the command line is not met; exit code 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that helps after an unknown `name`: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}"
