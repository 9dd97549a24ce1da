"""``qtool compile``: lower a checkpoint to an engine."""

from pathlib import Path
from typing import Annotated

import typer


def compile_(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .gguf file, built-in model or hub id.")],
    target: Annotated[str, typer.Option(help="Backend: openvino or reference.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Engine folder to write; must not exist.")],
    kv_cache: Annotated[
        str, typer.Option(help="Precision of the KV cache: f32, f16 or u8. Below f32 costs accuracy.")
    ] = "f32",
) -> None:
    """Build an engine for one kind of machine, ready to serve, and print its folder."""
    from rich.console import Console

    from qtool.compile.build import compile_engine
    from qtool.core.files import refuse_existing
    from qtool.core.sources import resolve

    refuse_existing(output)  # before a model is downloaded in vain
    source = resolve(checkpoint)
    with Console(stderr=True).status(f"compiling for {target}"):
        compile_engine(source, target, output, kv_cache=kv_cache)
    typer.echo(output)
