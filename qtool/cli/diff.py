"""``qtool diff``: what differs between two checkpoints, or two manifests."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from qtool.quantize.difference import Difference, Side


def diff(
    a: Annotated[Path, typer.Argument(help="Checkpoint folder, or a qtool_manifest.json.")],
    b: Annotated[Path, typer.Argument(help="The same kind of thing.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print every tensor as JSON.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="End with 1 when anything differs, as git diff does.")
    ] = False,
) -> None:
    """Compare number formats, codes, weights and recorded errors, linear by linear.

    Ends with 0 whether or not they differ, unless --exit-code is given.
    """
    import json

    from qtool.cli.output import stdout_console
    from qtool.quantize.diff import diff as compare

    found = list(compare(a, b))
    if as_json:
        typer.echo(json.dumps([one.model_dump(exclude_none=True) for one in found], indent=2))
    else:
        stdout_console().print(_table(found))
        same = sum(one.same for one in found)
        typer.echo(f"{same} of {len(found)} are the same")
    if exit_code and not all(one.same for one in found):
        raise typer.Exit(1)


def _table(found: Iterable["Difference"]) -> "Table":
    """One row for the like-named of all layers that have the same formats, without what is plain and equal.

    "max" and "mean" are of ``|a - b|`` over the weights.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from qtool.core.formats.naming import without_layer

    rows: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for one in found:
        if not one.same or one.same_codes is not None or one.max_abs is None:
            rows[without_layer(one.name).removeprefix("model."), _formats(one)].append(one)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, width in (("name", 20), ("of", 2), ("format", 16), ("same codes", 5)):
        table.add_column(heading, min_width=width, overflow="fold")
    for heading in ("max", "mean", "relative", "SQNR"):
        table.add_column(heading, overflow="fold")
    for (name, formats), members in rows.items():
        codes = [one.same_codes for one in members if one.same_codes is not None]
        table.add_row(
            name,
            str(len(members)),
            formats,
            f"{sum(codes)}/{len(codes)}" if codes else "",
            _number(max, [one.max_abs for one in members]),
            _number(_mean, [one.mean_abs for one in members]),
            _number(_mean, [one.relative for one in members]),
            _arrow(_sqnr([one.a for one in members]), _sqnr([one.b for one in members])),
        )
    return table


def _formats(one: "Difference") -> str:
    return _arrow(*("(none)" if side is None else side.scheme for side in (one.a, one.b)))


def _arrow(a: str, b: str) -> str:
    return a if a == b else f"{a} → {b}"


def _number(reduce: Callable[[Sequence[float]], float], values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{reduce(known):.2g}" if known else ""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sqnr(sides: Sequence["Side | None"]) -> str:
    """Of the outputs of linears, as their manifest says."""
    known = [side.record.sqnr_db for side in sides if side is not None and side.record is not None]
    return f"{_mean(known):.1f} dB" if known else ""
