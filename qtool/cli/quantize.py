"""``qtool quantize``: write a quantized checkpoint as a recipe says."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from qtool.core.manifest import Allocation, Manifest


def quantize(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file, built-in model or hub id; else the recipe's.")
    ] = None,
    *,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="A file, or a shipped recipe's name.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Checkpoint folder to write; must not exist.")
    ],
    dataset: Annotated[str | None, typer.Option(help="Calibration text, instead of the recipe's.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="Calibration windows to run.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a calibration window.")] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Hidden states of more than a quarter of it go to disk, as in 6GB; by default what is free.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu; cuda, or cuda:0,cuda:1 to spread linears; auto for what there is.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Calibrate, quantize layer by layer, and write a checkpoint with its manifest.

    A run that was interrupted goes on from its last finished layer when it is started again.
    """
    from qtool.cli.output import stdout_console
    from qtool.core.files import refuse_existing
    from qtool.core.memory import parse_bytes
    from qtool.core.recipe import override
    from qtool.core.sources import resolve
    from qtool.errors import UsageError
    from qtool.recipes import find_recipe

    chosen = find_recipe(recipe)
    calibration = override(chosen.calibration, dataset=dataset, num_samples=num_samples, seq_len=seq_len)
    chosen = override(chosen, calibration=calibration)
    source = checkpoint or chosen.model
    if source is None:
        raise UsageError(f"{recipe}: names no model; give a checkpoint on the command line")
    memory = None if max_memory is None else parse_bytes(max_memory)
    refuse_existing(output)  # before hours of work are done in vain
    model = resolve(source)
    from qtool.quantize.devices import parse_devices  # torch
    from qtool.quantize.pipeline import quantize_checkpoint
    from qtool.quantize.progress import layer_bar

    devices = parse_devices(device)
    try:
        with layer_bar() as progress:
            manifest = quantize_checkpoint(
                model, chosen, output, progress=progress, max_memory=memory, devices=devices
            )
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to go on from the last finished layer", err=True)
        raise
    _warn(manifest)
    _warn_of_experts(manifest, output)
    if as_json:
        typer.echo(manifest.model_dump_json(indent=2))
    else:
        stdout_console().print(_summary(manifest))
        if manifest.allocation is not None:
            stdout_console().print(_frontier(manifest.allocation))
        typer.echo(output)


def _warn(manifest: "Manifest") -> None:
    """Say on stderr when other software does not load what was written."""
    from qtool.core.formats.compressed_tensors import transformers_loads
    from qtool.core.schemes import IntScheme

    linears = manifest.linears.values()
    if not transformers_loads({IntScheme(one.num_bits, one.group_size, one.symmetric) for one in linears}):
        _warning(
            "transformers does not load zero points beside linears of another format; for a checkpoint that "
            "it does load, give all linears one num_bits and group_size, or symmetric: true"
        )


def _warn_of_experts(manifest: "Manifest", output: Path) -> None:
    """Name experts that calibration hardly reached, and say when other software does not load them."""
    from qtool.calibrate.experts import expert_of
    from qtool.core.checkpoint import Checkpoint
    from qtool.core.formats.compressed_tensors import transformers_loads_experts

    starved = {expert_of(name): one.tokens for name, one in manifest.linears.items() if one.starved}
    if starved:
        named = ", ".join(f"{expert} ({tokens})" for expert, tokens in starved.items())
        _warning(
            "these experts saw too few calibration tokens for their method and were rounded to nearest: "
            f"{named}; calibrate on more text, or set calibration.all_experts: true"
        )
    experts = {one for name, one in Checkpoint(output).schemes().items() if expert_of(name)}
    if not transformers_loads_experts(experts):
        _warning(
            "transformers does not load these experts as they are; for a checkpoint that it does load, give "
            "all experts one format, symmetric integers or fp8, and leave activations out"
        )


def _warning(text: str) -> None:
    typer.secho("warning: ", fg="yellow", bold=True, nl=False, err=True)
    typer.echo(text, err=True)


def _frontier(allocation: "Allocation") -> "Table":
    """What other budgets would have come to, and this one among them."""
    from rich.table import Table

    table = Table(title="sizes and estimated KL, nats a token, that budgets can have")
    for heading in ("average bits", "bytes", "KL", ""):
        table.add_column(heading, justify="right")
    chosen = allocation.chosen
    for point in sorted({*allocation.frontier, chosen}, key=lambda point: point.bytes):
        mark = "chosen" if point == chosen else ""
        table.add_row(f"{point.average_bits:.2f}", f"{point.bytes:,}", f"{point.kl:.2g}", mark)
    return table


def _summary(manifest: "Manifest") -> "Table":
    """One row for the linears that share method and number format, with their output SQNR."""
    from rich.table import Table

    table = Table(
        title=f"{manifest.seconds:.0f} s, {manifest.peak_memory_bytes / 2**30:.1f} GiB of memory at its peak"
    )
    for heading in ("linears", "method", "bits", "group", "mean SQNR", "worst SQNR", "of"):
        table.add_column(heading, overflow="fold")
    rows: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    for name, linear in manifest.linears.items():
        group = "channel" if linear.group_size is None else str(linear.group_size)
        rows[linear.method, str(linear.num_bits), group].append((linear.sqnr_db, name))
    for key, linears in rows.items():
        mean = sum(sqnr for sqnr, _ in linears) / len(linears)
        worst, name = min(linears)
        table.add_row(str(len(linears)), *key, f"{mean:.1f} dB", f"{worst:.1f} dB", name)
    return table
