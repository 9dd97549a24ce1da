"""``qtool convert``: a quantized checkpoint in another format."""

from pathlib import Path
from typing import Annotated

import typer

_FORMATS = "compressed-tensors, awq, gptq, gptq_v2, modelopt, fp8"  # qtool.core.formats.WRITERS needs torch


def convert(
    checkpoint: Annotated[
        str, typer.Argument(help="A quantized checkpoint: folder, built-in model or hub id.")
    ],
    output: Annotated[Path, typer.Argument(help="Checkpoint folder to write; must not exist.")],
    *,
    format_name: Annotated[str, typer.Option("--format", "-f", help=f"One of: {_FORMATS}.")],
) -> None:
    """Write the same codes and scales in the layout that another engine reads.

    What a format cannot hold exactly is refused.
    """
    from qtool.cli.progress import share_bar
    from qtool.core.sources import resolve
    from qtool.quantize.convert import convert_checkpoint

    with share_bar("converting") as report:
        convert_checkpoint(
            resolve(checkpoint),
            output,
            format_name,
            progress=lambda done, total: report(f"{done} of {total} tensors", done / total),
        )
    typer.echo(output)
