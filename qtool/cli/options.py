"""Options that several commands have."""

from typing import Annotated, TypeAlias

import typer

Device: TypeAlias = Annotated[
    str | None,
    typer.Option(help="cuda runs a checkpoint on a GPU, cuda:1 on the second; cpu by default."),
]
Threads: TypeAlias = Annotated[
    int | None,
    # more than any machine has cores, fewer than what kernels refuse and libraries then crash on
    typer.Option(min=1, max=1024, help="CPU threads of the engine; all cores by default."),
]
