"""How a quantization shows how far it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int, float | None], None]
"""Called after each layer: layers done, layers in all, the layer's mean SQNR in dB (None: all dense)."""


def silent(done: int, total: int, sqnr_db: float | None) -> None:
    """Report nothing."""


@contextmanager
def layer_bar() -> Iterator[Report]:
    """A bar over the layers on stderr, with the SQNR of the latest."""
    columns = (
        TextColumn("quantizing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[sqnr]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("layers", total=None, sqnr="")

        def report(done: int, total: int, sqnr_db: float | None) -> None:
            sqnr = "" if sqnr_db is None else f"SQNR {sqnr_db:.1f} dB"
            bar.update(task, completed=done, total=total, sqnr=sqnr)

        yield report
