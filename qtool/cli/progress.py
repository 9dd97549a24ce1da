"""A progress bar on stderr, so that stdout stays the result's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import Progress, TaskID


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


@contextmanager
def told_bar() -> Iterator[Callable[[str, int, int, str], None]]:
    """Show work of several parts: yields what is told the part, its steps done, of how many, and a word.

    A line every hundredth of a part where stderr is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:

        def line(part: str, done: int, total: int, word: str) -> None:
            if done == total or done % max(total // 100, 1) == 0:
                console.print(f"{part} {done}/{total} {word}".rstrip())

        yield line
        return
    with Progress(console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(part: str, done: int, total: int, word: str) -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=total)
            progress.update(tasks[part], description=f"{part} {word}".rstrip(), completed=done)

        yield show
