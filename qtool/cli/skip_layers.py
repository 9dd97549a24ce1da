"""``qtool skip-layers``: a draft model made from the model itself."""

from pathlib import Path
from typing import Annotated

import typer


def skip_layers(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .gguf file, built-in model or hub id.")],
    layers: Annotated[str, typer.Option(help="Layers to leave out, as in 4,8-11.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Checkpoint folder to write; must not exist.")
    ],
) -> None:
    """Write a checkpoint without some layers, to draft for the whole one: serve --speculative draft=..."""
    from qtool.core.files import refuse_existing
    from qtool.core.sources import resolve
    from qtool.quantize.skipping import parse_layers
    from qtool.quantize.skipping import skip_layers as write

    refuse_existing(output)
    write(resolve(checkpoint), parse_layers(layers), output)
    typer.echo(output)
