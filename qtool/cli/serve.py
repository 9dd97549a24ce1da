"""``qtool serve``: an OpenAI-compatible server over an engine."""

import logging
import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qtool.cli.options import Device, Threads


class SloPolicy(StrEnum):
    """What becomes of a request whose objective can't be kept."""

    QUEUE = "queue"
    REJECT = "reject"


class LogFormat(StrEnum):
    """How logs are written to stderr."""

    TEXT = "text"
    JSON = "json"


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
    max_queue: Annotated[
        int | None, typer.Option(min=0, help="Sequences that may wait; more are refused with 503.")
    ] = None,
    batch_wait_ms: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds to wait for others to start with.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="What requests are promised, as in ttft=500ms,tpot=50ms.")
    ] = None,
    slo_policy: Annotated[
        SloPolicy, typer.Option(help="reject: refuse with 503 what cannot have its first token in time.")
    ] = SloPolicy.QUEUE,
    prefix_caching: Annotated[
        bool, typer.Option(help="Whether prompts take over what earlier ones computed.")
    ] = True,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV cache holds, all sequences together.")
    ] = None,
    speculative: Annotated[
        str,
        typer.Option(
            help="What drafts tokens that one step verifies: off, ngram, draft=PATH (a smaller engine of the "
            "same tokenizer), heads=PATH, or auto (n-grams and what was compiled with the engine). "
            "Answers are distributed as without."
        ),
    ] = "off",
    speculative_tokens: Annotated[
        str, typer.Option(help="Tokens of a draft; auto decides at each step, none included.")
    ] = "auto",
    speculative_store: Annotated[
        int, typer.Option(min=0, help="Tokens of recent answers that n-grams are looked up in as well.")
    ] = 0,
    speculative_tree: Annotated[
        str,
        typer.Option(
            help="Tokens that heads draft at each depth; 1 is a chain, auto a tree where the engine takes it."
        ),
    ] = "auto",
    block_verification: Annotated[
        bool, typer.Option(help="Accept the tokens of a draft together, where they were drawn.")
    ] = False,
    threads: Threads = None,
    device: Device = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one a line; clients must send one of them.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin that may call the API; repeatable, none by default.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Megabytes a request may have.")] = 8,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for a request that names no deadline.")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for running requests after SIGTERM; no limit if left out."),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="hermes, llama3_json or mistral; read off the chat template if left out."),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="json writes an object a line, one for every request.")
    ] = LogFormat.TEXT,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="URL of an OpenTelemetry collector that gets a span for each request; needs the extra otel.",
        ),
    ] = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the running requests; a second signal stops at once."""
    from rich.console import Console

    from qtool.runtime.client import Client
    from qtool.runtime.engines import open_engine
    from qtool.runtime.scheduler import SchedulerConfig
    from qtool.runtime.server.process import Address
    from qtool.runtime.server.process import serve as serve_until_signal
    from qtool.runtime.server.settings import ServerSettings, read_api_keys
    from qtool.runtime.slo import parse_slo
    from qtool.runtime.speculation.build import (
        SpeculationConfig,
        make_speculator,
        parse_count,
        parse_kind,
    )
    from qtool.runtime.tokenizer import Tokenizer
    from qtool.runtime.tools.formats import tool_format

    given: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_queue": max_queue,
        "batch_wait_ms": batch_wait_ms,
        "slo": None if slo is None else parse_slo(slo, slo_policy.value),
        "prefix_caching": prefix_caching,
    }
    config = replace(SchedulerConfig(), **{name: value for name, value in given.items() if value is not None})

    kind, path = parse_kind(speculative)
    speculation = SpeculationConfig(
        kind,
        path,
        num_tokens=parse_count("speculative_tokens", speculative_tokens),
        tree_width=parse_count("speculative_tree", speculative_tree),
        block_verification=block_verification,
        store_tokens=speculative_store,
        kv_cache_tokens=kv_cache_tokens,
        threads=threads,
        device=device,
    )

    def load() -> Client:
        console = Console(stderr=True)
        if not console.is_terminal:
            console.print(f"loading {engine}")
        with console.status(f"loading {engine}"):
            tokenizer = Tokenizer.load(engine)
            opened = open_engine(engine, kv_cache_tokens=kv_cache_tokens, threads=threads, device=device)
            speculator = make_speculator(speculation, config, opened, tokenizer, engine)
            return Client(opened, tokenizer, config, speculator)

    settings = ServerSettings(
        api_keys=frozenset() if api_key_file is None else read_api_keys(api_key_file),
        allow_origins=tuple(allow_origin or ()),
        max_body_bytes=max_body_mb * 2**20,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        tool_format=None if tool_call_parser is None else tool_format(tool_call_parser),
        log_format=log_format.value,
        otlp_endpoint=otlp_endpoint or None,
    )
    model = served_model_name or engine.resolve().name

    def ready(url: str) -> None:
        typer.echo(f"{model} is served at {url}/v1 (health: {url}/health)")

    code = serve_until_signal(Address(host, port), model, load, ready, settings)
    if code:  # what was cut short may still be in native code, which would abort the interpreter's own end
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
