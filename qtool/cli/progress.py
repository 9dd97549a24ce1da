"""A progress bar on stderr, so that stdout stays the result's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps, a line a step where stderr is no terminal; yields what advances it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        steps = count(1)
        yield lambda: console.print(f"{what} {next(steps)}/{total}")
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def share_bar(what: str) -> Iterator[Callable[[str, float], None]]:
    """Show what goes on; yields the function that is told the phase and the share of the whole, 0 to 1.

    Until the first call there is no bar, since some work tells nothing of its progress.
    """
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda phase, share: progress.update(
            task, description=f"{what}: {phase.lower()}", completed=share, total=1.0
        )
