"""``qtool inspect``: what a checkpoint or an engine is, and what its steps cost at least."""

import json
import math
from typing import TYPE_CHECKING, Annotated

import typer

from qtool.cli.output import size_text, stdout_console

if TYPE_CHECKING:
    from rich.table import Table

    from qtool.compile.inspection import Inspection
    from qtool.compile.roofline import Machine, Step


def inspect(
    model: Annotated[
        str, typer.Argument(help="Engine, checkpoint folder, .gguf file, built-in model or hub id.")
    ],
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Memory bandwidth in GB/s; measured here by default, if the engine runs on this CPU.",
        ),
    ] = None,
    flops: Annotated[
        float | None, typer.Option(min=0.000001, help="Arithmetic in TFLOP/s; wants --bandwidth as well.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence that decodes.")] = 1024,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, computed in one step.")] = 512,
    kv_cache: Annotated[str, typer.Option(help="Precision of a checkpoint's keys and values.")] = "f16",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Linears and bits, bytes by part, KV bytes a token, and the floor of a decode and a prefill step."""
    from qtool.compile.targets import KV_PRECISIONS, TARGETS
    from qtool.core.sources import resolve
    from qtool.errors import UsageError, nearest

    _check_speeds(bandwidth, flops)
    if kv_cache not in KV_PRECISIONS:
        raise UsageError(f"--kv-cache {kv_cache!r} is unknown; {nearest(kv_cache, KV_PRECISIONS)}")
    path = resolve(model)
    from qtool.compile.inspection import inspect as read  # torch
    from qtool.compile.roofline import predict_step

    found, config, weights = read(path)
    if found.engine is not None:
        kv_cache = found.engine.kv_cache
    runs_here = found.engine is None or TARGETS[found.engine.target].on_cpu
    machine, kv_bytes = _machine(bandwidth, flops, runs_here), found.kv_bytes_per_token[kv_cache]
    steps = {
        f"decode, {batch} x {context}": predict_step(
            config, weights, kv_bytes, machine, batch=batch, past=context, new=1
        ),
        f"prefill, {batch} x {prompt}": predict_step(
            config, weights, kv_bytes, machine, batch=batch, past=0, new=prompt
        ),
    }
    if as_json:
        costs = {
            name: {**step.model_dump(), "time": step.time, "bound": step.bound}
            for name, step in steps.items()
        }
        typer.echo(
            json.dumps(
                {
                    **found.model_dump(mode="json"),
                    "machine": machine and machine.model_dump(),
                    "steps": costs,
                },
                indent=2,
            )
        )
        return
    console = stdout_console()
    for table in (
        _facts(found),
        _parts(found),
        _linears(found),
        _profiles(found),
        _steps(steps, machine, kv_cache),
    ):
        if table.row_count:
            console.print(table)


def _check_speeds(bandwidth: float | None, flops: float | None) -> None:
    from qtool.errors import UsageError

    for option, value in (("--bandwidth", bandwidth), ("--flops", flops)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{option} is {value}, wanted a finite number")
    if bandwidth is None and flops is not None:
        raise UsageError("--flops alone would be judged by this machine's memory; give --bandwidth too")


def _machine(bandwidth: float | None, flops: float | None, runs_here: bool) -> "Machine | None":
    """What steps run on: as given, or this CPU as measured; None for an engine of another machine."""
    from qtool.compile.machine import measure
    from qtool.compile.roofline import Machine

    if bandwidth is None:
        return measure() if runs_here else None
    return Machine(bandwidth=bandwidth * 1e9, flops=None if flops is None else flops * 1e12, measured=False)


def _facts(found: "Inspection") -> "Table":
    table = _table(found.path, "", "")
    table.add_row("kind", found.kind)
    table.add_row("architecture", f"{found.architecture}, {found.num_layers} layers")
    table.add_row("parameters", f"{found.parameters / 1e6:,.1f} M")
    table.add_row("weights", size_text(found.weight_bytes))
    table.add_row("longest context", f"{found.max_context:,} tokens")
    for name, size in found.kv_bytes_per_token.items():
        table.add_row(
            f"KV cache, {name}", f"{size:,} bytes a token, {size_text(size * found.max_context)} at most"
        )
    if found.engine is not None:
        table.add_row("block", f"{found.engine.block_size} tokens")
        if (options := found.engine.openvino) is not None:
            rounded = options.dynamic_quantization
            table.add_row("computes in", options.precision)
            table.add_row("inputs rounded to int8", f"{rounded} with one scale" if rounded else "none")
        table.add_row("window", f"{found.engine.window} tokens" if found.engine.window else "none")
        table.add_row("drafts verified", "chains and trees" if found.engine.takes_trees else "chains")
        given = found.engine.hidden_states
        table.add_row("hidden states", f"of {', '.join(map(str, given.layers))}" if given else "none")
        table.add_row(
            "built with", ", ".join(f"{name} {text}" for name, text in found.engine.versions.items())
        )
    if found.compute_capabilities:
        table.add_row(
            "compute capabilities", ", ".join(f"{cc / 10:.1f}" for cc in found.compute_capabilities)
        )
    return table


def _parts(found: "Inspection") -> "Table":
    table = _table("bytes", "part", "size", "share")
    for name, size in sorted(found.parts.items(), key=lambda item: -item[1]):
        table.add_row(name, size_text(size), f"{size / found.weight_bytes:.1%}")
    return table


def _linears(found: "Inspection") -> "Table":
    table = _table("linears", "name", "count", "outputs x inputs", "stored as", "bits a weight", "size")
    for row in found.linears:
        shape = f"{row.out_features} x {row.in_features}"
        table.add_row(
            row.name.removeprefix("model."),
            str(row.count),
            shape,
            row.scheme,
            f"{row.bits:.2f}",
            size_text(row.bytes),
        )
    return table


def _profiles(found: "Inspection") -> "Table":
    table = _table("profiles", "call", "least, best and largest sizes", "memory of a context")
    for profile in found.profiles:
        sizes = ", ".join(f"{name} {low}/{best}/{high}" for name, (low, best, high) in profile.sizes.items())
        table.add_row(profile.kind, sizes, size_text(profile.activation_bytes))
    return table


def _steps(steps: dict[str, "Step"], machine: "Machine | None", kv_cache: str) -> "Table":
    if machine is None:
        floor = "floor, for times give --bandwidth of the machine that it runs on"
    else:
        arithmetic = "" if machine.flops is None else f", {machine.flops / 1e12:.3g} TFLOP/s"
        source = "measured here" if machine.measured else "given"
        floor = f"floor at {machine.bandwidth / 1e9:.1f} GB/s{arithmetic} ({source})"
    table = _table(
        f"{floor}, KV cache {kv_cache}",
        *("sequences x tokens", "moved", "GFLOP", "at least", "tokens/s", "bound by"),
    )
    for name, step in steps.items():
        moved = (name, size_text(step.bytes), f"{step.flops / 1e9:.2f}")
        if step.time is None:
            table.add_row(*moved, "", "", "")
        else:
            speed = f"{step.tokens / step.time:,.0f}"
            table.add_row(*moved, _time(step.time), speed, step.bound or "give --flops")
    return table


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
