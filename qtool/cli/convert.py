"""``qtool convert``: a quantized checkpoint in another format."""

from pathlib import Path
from typing import Annotated

import typer

from qtool.core.formats import WRITERS, check_writer


def convert(
    checkpoint: Annotated[
        str, typer.Argument(help="A quantized checkpoint: folder, built-in model or hub id.")
    ],
    output: Annotated[Path, typer.Argument(help="Checkpoint folder to write; must not exist.")],
    *,
    format_name: Annotated[str, typer.Option("--format", "-f", help=f"One of: {', '.join(WRITERS)}.")],
) -> None:
    """Write the same codes and scales in the layout that another engine reads.

    What a format cannot hold exactly is refused.
    """
    from qtool.cli.progress import share_bar
    from qtool.core.files import refuse_existing
    from qtool.core.sources import resolve

    check_writer(format_name)
    refuse_existing(output)
    source = resolve(checkpoint)
    from qtool.quantize.convert import convert_checkpoint  # torch

    with share_bar("converting") as report:
        convert_checkpoint(
            source,
            output,
            format_name,
            progress=lambda done, total: report(f"{done} of {total} tensors", done / total),
        )
    typer.echo(output)
