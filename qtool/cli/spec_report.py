"""``qtool spec-report``: whether speculation pays on one's own prompts, and which."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.options import Device, Threads

if TYPE_CHECKING:
    from rich.table import Table

    from qtool.runtime.speculation.report import DrafterReport, Report


def spec_report(
    engine: Annotated[Path, typer.Argument(help="Engine folder, or a checkpoint for the reference engine.")],
    prompts: Annotated[
        Path, typer.Option(help="Text file, a prompt a line, or JSONL with messages or a prompt in each.")
    ],
    speculative: Annotated[
        list[str] | None,
        typer.Option(
            help="What drafts, as for serve; repeatable. If left out ngram, and auto if a draft is there."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Sequences at once; repeatable. If left out 1, 4 and 16, as far as there are prompts.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="As your requests have it; 0 is greedy.")] = 0.0,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Times that each is measured: how far they lie apart tells what is noise."),
    ] = 3,
    threads: Threads = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Acceptance by drafter and length, expected and measured speedups by batch size, and what to use."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from qtool.cli.progress import progress_bar
    from qtool.compile.engine import DRAFT_FOLDER
    from qtool.errors import UsageError
    from qtool.runtime.engines import open_engine
    from qtool.runtime.request import SamplingParams
    from qtool.runtime.scheduler import SchedulerConfig
    from qtool.runtime.speculation.build import SpeculationConfig, make_drafters, measure_times, parse_kind
    from qtool.runtime.speculation.prompts import read_prompts, refuse_misfits
    from qtool.runtime.speculation.report import make_report, num_runs
    from qtool.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(engine)
    asked = read_prompts(prompts, tokenizer)
    usual = ["ngram", "auto"] if (engine / DRAFT_FOLDER).is_dir() else ["ngram"]
    names, batches = speculative or usual, batch or [size for size in (1, 4, 16) if size <= len(asked)]
    if max(batches) > len(asked):
        raise UsageError(
            f"--batch {max(batches)}: {prompts} holds {len(asked)} prompts; "
            "give smaller batches or more prompts"
        )
    configs = {name: SpeculationConfig(*parse_kind(name), threads=threads, device=device) for name in names}
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, stop_token_ids=tokenizer.eos_token_ids
    )
    with Console(stderr=True).status(f"loading and timing {engine}"):
        opened = open_engine(engine, threads=threads, device=device)
        refuse_misfits(asked, opened, params)
        times = measure_times(opened, SchedulerConfig())
        drafters = {
            name: make_drafters(config, opened, tokenizer, engine, times) for name, config in configs.items()
        }
    with progress_bar("runs", num_runs(len(drafters), len(batches), repeats)) as advance:
        report = make_report(opened, times, drafters, [*asked.values()], params, batches, repeats, advance)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    console = Console()
    console.print(
        f"{report.num_prompts} prompts; a step of 1 row takes {report.step_ms[1]:.1f} ms, of 8 rows "
        f"{report.step_ms[8]:.1f} ms; without speculation {_speeds(report)}"
    )
    for found in report.drafters:
        console.print(_table(found))
    console.print(f"Recommended: --speculative {report.recommendation}")


def _speeds(report: "Report") -> str:
    return ", ".join(
        f"{speed:.0f} tokens/s at batch {batch}" for batch, speed in report.plain_tokens_per_second.items()
    )


def _table(found: "DrafterReport") -> "Table":
    from rich.table import Table

    table = Table(
        title=f"{found.name}: {found.draft_share:.0%} of steps have a draft, "
        f"{found.drafting_ms:.2f} ms a drafted token",
        title_justify="left",
    )
    for heading in (
        "K",
        "acceptance length",
        "tokens a step",
        *(f"batch {batch}" for batch in found.measured),
    ):
        table.add_column(heading, justify="right")
    for setting in found.settings:
        expected = (f"{speedup:.2f}x" for speedup in setting.expected.values())
        table.add_row(
            str(setting.num_tokens),
            f"{setting.acceptance_length:.2f}",
            f"{setting.tokens_per_step:.2f}",
            *expected,
        )
    table.add_section()
    measured = (
        f"{one.median:.2f}x ({one.lowest:.2f} to {one.highest:.2f})" for one in found.measured.values()
    )
    table.add_row("auto", "", "measured", *measured)
    return table
