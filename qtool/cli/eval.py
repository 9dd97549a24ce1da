"""``qtool eval``: measure how far a model drifts from its baseline, and gate on it."""

from typing import Annotated

import typer

from qtool.cli.options import Threads


def eval_(
    model: Annotated[str, typer.Argument(help="Checkpoint or engine to judge.")],
    baseline: Annotated[str, typer.Option(help="The unquantized checkpoint (or an engine of it).")],
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Take dataset, windows and gates from it.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Text to judge on; the recipe's by default.")] = None,
    num_windows: Annotated[int | None, typer.Option(min=1, help="Windows from the text's start.")] = None,
    window_len: Annotated[int | None, typer.Option(min=2, help="Tokens in a window.")] = None,
    max_kl: Annotated[float | None, typer.Option(help="Gate: mean KL in nats a token.")] = None,
    max_kl_p99: Annotated[float | None, typer.Option(help="Gate: 99th percentile of KL.")] = None,
    max_ppl_increase: Annotated[float | None, typer.Option(help="Gate: 0.05 allows 5 %.")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Gate: share of equal argmax.")] = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Perplexity, KL divergence and top-1 agreement against the baseline; exit code 1 when a gate fails."""
    from qtool.cli.output import stdout_console
    from qtool.cli.progress import progress_bar
    from qtool.core.recipe import Evaluation, override
    from qtool.core.sources import resolve
    from qtool.errors import GateError
    from qtool.recipes import find_recipe

    chosen = find_recipe(recipe).evaluation if recipe else Evaluation()
    gates = override(
        chosen.gates,
        max_kl=max_kl,
        max_kl_p99=max_kl_p99,
        max_ppl_increase=max_ppl_increase,
        min_top1=min_top1,
    )
    chosen = override(chosen, dataset=dataset, num_windows=num_windows, window_len=window_len, gates=gates)
    judged, against = resolve(model), resolve(baseline)
    from qtool.eval.evaluate import evaluate  # torch

    with progress_bar("windows", chosen.num_windows) as advance:
        report = evaluate(judged, against, chosen, threads=threads, on_window=advance)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        stdout_console().print(report.table())
    if not report.passed:
        raise GateError("; ".join(str(gate) for gate in report.gates if not gate.passed))
