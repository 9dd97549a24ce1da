"""``qtool serve``: an OpenAI-compatible server over an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer


def serve(
    engine: Annotated[Path, typer.Argument(help="Engine folder, or a checkpoint for the reference engine.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API; the folder's by default.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a step computes; fewer stall running answers less.")
    ] = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV cache holds, all sequences together.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine.")] = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the running requests; a second signal stops at once."""
    from rich.console import Console

    from qtool.runtime.client import Client
    from qtool.runtime.engines import open_engine
    from qtool.runtime.scheduler import SchedulerConfig
    from qtool.runtime.server.process import Address
    from qtool.runtime.server.process import serve as serve_until_signal
    from qtool.runtime.tokenizer import Tokenizer

    given = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    config = replace(SchedulerConfig(), **{name: value for name, value in given.items() if value is not None})

    def load() -> Client:
        with Console(stderr=True).status(f"loading {engine}"):
            tokenizer = Tokenizer.load(engine)
            opened = open_engine(engine, kv_cache_tokens=kv_cache_tokens, threads=threads)
            return Client(opened, tokenizer, config)

    model = served_model_name or engine.resolve().name

    def ready(url: str) -> None:
        typer.echo(f"{model} is served at {url}/v1 (health: {url}/health)")

    code = serve_until_signal(Address(host, port), model, load, ready)
    raise typer.Exit(code)
