"""Where results are printed: stdout, as wide as a terminal, and elsewhere as wide as they need."""

import os

from rich.console import Console

_UNBOUNDED = 10_000
"""Columns, more than any table has."""


def stdout_console() -> Console:
    """A console that cuts tables only where a terminal would, or at COLUMNS where that is set."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_UNBOUNDED)
