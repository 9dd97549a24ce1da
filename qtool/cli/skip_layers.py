"""``qtool skip-layers``: a draft model made from the model itself."""

import re
from pathlib import Path
from typing import Annotated

import typer

from qtool.errors import UsageError

_MOST = 10_000
"""Layers that no model has."""


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

    refuse_existing(output)
    skipped = parse_layers(layers)
    model = resolve(checkpoint)
    from qtool.quantize.skipping import skip_layers as write  # torch

    write(model, skipped, output)
    typer.echo(output)


def parse_layers(text: str) -> frozenset[int]:
    """Read layers as in ``4,8-11``. UsageError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last < _MOST:
            raise UsageError(f"layers: {part!r} is no layer or range below {_MOST}; write them as in 4,8-11")
        found |= set(range(first, last + 1))
    return frozenset(found)
