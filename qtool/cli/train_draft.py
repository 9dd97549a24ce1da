"""``qtool train-draft``: train draft heads for a checkpoint on its own outputs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import Device, Threads


class Kind(StrEnum):
    """What is trained."""

    MEDUSA = "medusa"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"


def train_draft(
    checkpoint: Annotated[str, typer.Argument(help="Folder, .gguf file, built-in model or hub id.")],
    *,
    kind: Annotated[
        Kind, typer.Option(help="eagle learns most from little text; eagle3 reads several layers.")
    ] = Kind.EAGLE,
    data: Annotated[
        str, typer.Option(help="Text or chats: a .txt or .jsonl file, builtin:pydoc or hub:OWNER/NAME.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    engine: Annotated[
        Path | None,
        typer.Option(
            help="Engine of the checkpoint, compiled with --hidden-states eagle3,final: quicker than the "
            "reference engine, and what will be served."
        ),
    ] = None,
    epochs: Annotated[float, typer.Option(min=0.01, help="How often the data is gone through.")] = 2.0,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Tokens of a draft that are learned.")] = 3,
    seq_len: Annotated[int, typer.Option(min=32, help="Tokens of a sequence.")] = 256,
    max_sequences: Annotated[
        int | None, typer.Option(min=24, help="Sequences, spread over the data; all by default.")
    ] = None,
    own_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of texts that the model continues by itself.")
    ] = 0.5,
    draft_vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the heads can propose; 8192 by default, or all if fewer."),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Its highest value; by default what suits the kind.")
    ] = None,
    threads: Threads = None,
    device: Device = None,
) -> None:
    """Collect what the model says and thinks, train heads on it, and print how many tokens they save.

    A run that was interrupted goes on where it was when the same command is given again. Text is taken as it
    is, or its first quarter is a prompt; chats are answered by the model itself.
    """
    import torch
    from rich.console import Console

    from qtool.cli.progress import told_bar
    from qtool.core.files import refuse_existing
    from qtool.core.sources import resolve
    from qtool.runtime.engines import open_engine
    from qtool.runtime.speculation.training.corpus import CorpusOptions
    from qtool.runtime.speculation.training.run import Course, train_head
    from qtool.runtime.speculation.training.start import HeadOptions
    from qtool.runtime.speculation.training.train import TrainOptions

    refuse_existing(output)
    if threads is not None:
        torch.set_num_threads(threads)
    model = resolve(checkpoint)
    opened = open_engine(engine or model, kv_cache_tokens=32 * (seq_len + 64), threads=threads, device=device)
    course = Course(
        HeadOptions(kind.value, draft_vocab, num_heads=depth),
        CorpusOptions(seq_len, own_share, max_sequences=max_sequences),
        TrainOptions(epochs, depth=depth, learning_rate=learning_rate),
        data,
    )
    with told_bar() as told:
        report = train_head(model, opened, course, output, told, device or "cpu")
    rates = " ".join(f"{rate:.2f}" for rate in report.acceptance)
    Console(stderr=True).print(
        f"held out: each draft is accepted with {rates}; {report.acceptance_length:.2f} tokens a step"
    )
    typer.echo(output)
