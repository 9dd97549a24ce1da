"""``qtool sensitivity``: which parts of a model its answers care about most."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from qtool.quantize.sensitivity import Report


def sensitivity(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .gguf file, built-in model or hub id.")],
    *,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Rank what it quantizes; every part by default.")
    ] = None,
    dataset: Annotated[str, typer.Option(help="Text to measure on.")] = "builtin:pydoc",
    num_samples: Annotated[int, typer.Option(min=1, help="Windows of it.")] = 4,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens in a window.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Chooses windows, and what the model would say.")] = 0,
    check: Annotated[int, typer.Option(min=0, help="Parts whose KL is measured too.")] = 12,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 30,
    plot: Annotated[Path | None, typer.Option(help="Draw the ranking too: FILE.svg, .png or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every part as JSON.")] = False,
) -> None:
    """Rank weights, activations, KV cache and attention by the KL that rounding each would cost.

    Estimated for all in one pass through the model and back, measured for a few to tell how well that ranks.
    """
    from qtool.cli.output import stdout_console
    from qtool.cli.progress import progress_bar
    from qtool.core.recipe import Calibration, override
    from qtool.core.sources import resolve
    from qtool.quantize.plots import plot_sensitivity, require_matplotlib
    from qtool.recipes import find_recipe

    if plot is not None:
        require_matplotlib(plot)  # before minutes of work are done in vain
    asked = find_recipe(recipe).quantization if recipe else None
    calibration = override(
        Calibration(), dataset=dataset, num_samples=num_samples, seq_len=seq_len, seed=seed
    )
    model = resolve(checkpoint)
    from qtool.calibrate.layers import LayerRunner  # torch, from here on
    from qtool.calibrate.windows import check_vocabulary, recipe_windows
    from qtool.core.checkpoint import Checkpoint
    from qtool.quantize.sensitivity import default_parts, recipe_parts
    from qtool.quantize.sensitivity import sensitivity as rank

    source = Checkpoint(model)
    runner = LayerRunner(source)
    parts = default_parts(runner) if asked is None else recipe_parts(runner, asked)
    windows, _ = recipe_windows(source, calibration)
    check_vocabulary(windows, runner.vocab_size, source.path)
    with progress_bar("layers", len(runner)) as advance:
        report = rank(
            runner, windows, parts, checked=check, seed=seed, progress=lambda done, total: advance()
        )
    if plot is not None:
        plot_sensitivity(report, plot)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
        return
    console = stdout_console()
    console.print(_table(report, top))
    for line in _said(report):
        console.print(line, soft_wrap=True)


def _table(report: "Report", top: int) -> "Table":
    from rich.table import Table

    table = Table(title=f"KL of rounding one part, nats a token, over {report.tokens} tokens")
    for heading in ("rank", "part", "of", "rounded to", "estimated", "measured"):
        table.add_column(heading, overflow="fold")
    for rank, part in enumerate(report.parts, 1):
        if rank <= top or part.measured is not None:
            measured = "" if part.measured is None else f"{part.measured:.2g}"
            table.add_row(str(rank), part.what, part.name, part.format, f"{part.kl:.2g}", measured)
    return table


def _said(report: "Report") -> list[str]:
    """How well the ranking foretells, and whether the model has the order that articles give."""
    from qtool.quantize.sensitivity import EXPECTED

    count = sum(part.measured is not None for part in report.parts)
    rho = report.rank_correlation
    told = "none, since that takes 3 (--check)" if rho is None else f"{rho:.2f}"
    lines = [f"rank correlation with {count} measured parts: {told}"]
    for kind, kls in report.together.items():
        order = report.order(kind)
        agrees = "as" if order == EXPECTED else "not as"
        found = " < ".join(f"{what} {kls[what]:.2g}" for what in order)
        lines.append(f"all in {kind}: {found}; {agrees} published: {' < '.join(EXPECTED)}")
    return lines
