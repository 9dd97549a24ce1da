"""``qtool run``: one answer on the terminal."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from qtool.cli.options import Device, Threads
from qtool.errors import UsageError


def run(
    engine: Annotated[Path, typer.Argument(help="Engine folder, or a checkpoint for the reference engine.")],
    prompt: Annotated[str, typer.Argument(help="What to ask; with --raw, the text to continue.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    threads: Threads = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer and its usage as JSON.")] = False,
) -> None:
    """Answer one chat message, streamed to stdout."""
    if raw and system is not None:
        raise UsageError("--system has no place in --raw, which uses no chat template; leave one out")
    import json

    from rich.console import Console

    from qtool.runtime.answer import answer
    from qtool.runtime.engines import max_context, open_engine
    from qtool.runtime.request import SamplingParams
    from qtool.runtime.scheduler import refuse_longer
    from qtool.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(engine)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tokenizer.eos_token_ids,
    )
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    ids = tokenizer.encode(prompt) if raw else tokenizer.encode_chat(messages)
    # Before the pool for so many tokens is asked for.
    refuse_longer(len(ids), max_tokens, max_context(engine), "the model's context is")
    with Console(stderr=True).status(f"loading {engine}"):
        opened = open_engine(engine, kv_cache_tokens=len(ids) + max_tokens, threads=threads, device=device)

    def show(text: str) -> None:
        typer.echo(text, nl=False)

    result = answer(opened, tokenizer, ids, params, (lambda _: None) if as_json else show)
    if as_json:
        typer.echo(json.dumps(asdict(result), ensure_ascii=False))
    else:
        typer.echo()
