"""The command line: one file a sub-command, what is heavy imported inside the command.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 failed (a gate that is not met
included), 2 asked for something that cannot be, 130 interrupted, 143 terminated.
"""

from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from qtool.cli import recipe
from qtool.cli.batch import batch
from qtool.cli.compile import compile_
from qtool.cli.convert import convert
from qtool.cli.diff import diff
from qtool.cli.eval import eval_
from qtool.cli.failures import enable_debug, report
from qtool.cli.fetch import fetch
from qtool.cli.inspect import inspect
from qtool.cli.quantize import quantize
from qtool.cli.run import run
from qtool.cli.sensitivity import sensitivity
from qtool.cli.serve import serve
from qtool.cli.skip_layers import skip_layers
from qtool.cli.spec_report import spec_report
from qtool.cli.train_draft import train_draft

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
app.command()(fetch)
app.command()(quantize)
app.command()(convert)
app.command()(diff)
app.command()(sensitivity)
app.command("eval")(eval_)
app.command("compile")(compile_)
app.command()(train_draft)
app.command()(inspect)
app.command()(serve)
app.command()(run)
app.command()(batch)
app.command("spec-report")(spec_report)
app.command("skip-layers")(skip_layers)
app.add_typer(recipe.app, name="recipe")


def _print_versions(asked: bool) -> None:
    if not asked:
        return
    from qtool.core.manifest import versions

    for package, version in versions().items():
        typer.echo(f"{package} {version}")
    raise typer.Exit


def _debug(asked: bool) -> None:
    if asked:
        enable_debug()


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=_debug, help="Show the traceback of an error.")
    ] = False,
) -> None:
    """From a Hugging Face LLM checkpoint to a served endpoint: quantize, judge, compile, serve."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, `arguments` instead of the process's own when given, and exit."""
    command = typer.main.get_command(app)
    try:
        command(arguments, prog_name="qtool")
    except (Exception, KeyboardInterrupt) as error:
        raise SystemExit(report(error)) from error
    raise SystemExit(0)
