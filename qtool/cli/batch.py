"""``qtool batch``: answer a file of requests without a server."""

from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import Device, Threads
from qtool.errors import UsageError


def batch(
    engine: Annotated[Path, typer.Argument(help="Engine folder, or a checkpoint for the reference engine.")],
    requests: Annotated[Path, typer.Argument(help="OpenAI batch file: a request a line, as JSON.")],
    responses: Annotated[Path, typer.Argument(help="File to write: a response a line, in any order.")],
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the requests; the folder's by default.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 64,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV cache holds, all sequences together.")
    ] = None,
    threads: Threads = None,
    device: Device = None,
) -> None:
    """Answer every request of a batch file; exit code 1 if some got an error. Interrupted, it goes on where
    it was when started again."""
    if responses.exists():
        raise UsageError(f"{responses}: exists already; move it away or name another file")
    import asyncio
    import json

    from rich.console import Console
    from rich.progress import Progress

    from qtool.runtime.client import Client
    from qtool.runtime.engines import open_engine
    from qtool.runtime.scheduler import SchedulerConfig
    from qtool.runtime.server.batch import num_failed, read_answered, read_requests, run_batch
    from qtool.runtime.server.responses import Json
    from qtool.runtime.server.service import make_service
    from qtool.runtime.server.settings import ServerSettings
    from qtool.runtime.tokenizer import Tokenizer

    asked = read_requests(requests)
    partial = responses.with_name(responses.name + ".partial")
    answered = read_answered(partial)
    left = [request for request in asked if request.custom_id not in answered]
    console = Console(stderr=True)
    with console.status(f"loading {engine}"):
        tokenizer = Tokenizer.load(engine)
        opened = open_engine(engine, kv_cache_tokens=kv_cache_tokens, threads=threads, device=device)
        budget = max(SchedulerConfig.max_num_batched_tokens, max_num_seqs)
        client = Client(opened, tokenizer, SchedulerConfig(max_num_seqs, budget, max_queue=2**31))
    service = make_service(client, served_model_name or engine.resolve().name, ServerSettings())

    async def answer_all() -> None:
        client.start()
        try:
            with Progress(console=console) as progress, partial.open("a", encoding="utf-8") as out:
                task = progress.add_task("requests", total=len(asked), completed=len(answered))

                def write(line: Json) -> None:
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
                    out.flush()
                    progress.advance(task)

                await run_batch(service, left, 2 * max_num_seqs, write)
        finally:
            client.loop.stop()
            client.loop.join()

    asyncio.run(answer_all())
    failed = num_failed(partial)
    partial.rename(responses)
    typer.echo(f"{responses}: {len(asked)} responses, {len(left)} of them made now, {failed} of them errors")
    if failed:
        raise typer.Exit(1)
