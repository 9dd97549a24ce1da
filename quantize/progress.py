"""How a quantization shows how far it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int, float | None], None]
"""Called at the start and after each layer: layers done, layers in all, the layer's mean SQNR in dB.

None in place of the SQNR: no layer yet, or all of it stays in full precision.
"""


def silent(done: int, total: int, sqnr_db: float | None) -> None:
    """Report nothing."""


def _sqnr(sqnr_db: float | None) -> str:
    return "" if sqnr_db is None else f"SQNR {sqnr_db:.1f} dB"


@contextmanager
def layer_bar() -> Iterator[Report]:
    """A bar over the layers on stderr, with the SQNR of the latest; a line a layer off a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, sqnr_db: console.print(f"layer {done}/{total} {_sqnr(sqnr_db)}".rstrip())
        return
    columns = (
        TextColumn("quantizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[sqnr]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task("layers", total=None, sqnr="")

    def report(done: int, total: int, sqnr_db: float | None) -> None:
        bar.update(task, completed=done, total=total, sqnr=_sqnr(sqnr_db))
        bar.start()

    try:
        yield report
    finally:
        if bar.live.is_started:  # a run that is refused shows its error alone
            bar.stop()
