"""A server on a real socket, in a thread of the test's process."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import uvicorn
from openai import OpenAI

from qtool.runtime.client import Client
from qtool.runtime.engines.contract import Engine
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.server.app import create_app
from qtool.runtime.server.middleware import Handled
from qtool.runtime.server.settings import ServerSettings
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.tokenizer import Tokenizer

E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class Served(Generic[E]):
    engine: E
    client: Client
    url: str

    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@contextmanager
def serving(
    engine: E,
    tokenizer: Tokenizer,
    config: SchedulerConfig | None = None,
    settings: ServerSettings | None = None,
    speculator: Speculator | None = None,
    observers: Sequence[Callable[[Handled], None]] = (),
) -> Iterator[Served[E]]:
    """Serve an engine under the name "model"."""
    client = Client(engine, tokenizer, config or SchedulerConfig(8, 64), speculator)
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(client, "model", settings, observers)
    uvicorn_config = uvicorn.Config(app, log_config=None, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(uvicorn_config)

    async def main() -> None:
        client.start()
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield Served(engine, client, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
        client.loop.stop()
        assert client.loop.join(10)
