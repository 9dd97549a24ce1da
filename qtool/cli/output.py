"""How results are printed: to stdout, as wide as a terminal, and elsewhere as wide as they need."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_UNBOUNDED = 10_000
"""Columns, more than any table has."""


def stdout_console() -> "Console":
    """A console that cuts tables only where a terminal would, or at COLUMNS where that is set."""
    from rich.console import Console

    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_UNBOUNDED)


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"
