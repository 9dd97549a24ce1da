"""The server as a process: its socket, its signals, and an end that loses no admitted request."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from qtool.errors import QtoolError
from qtool.runtime.client import Client
from qtool.runtime.server.app import create_app

_BACKLOG = 2048
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000


def serve(address: Address, model: str, load: Callable[[], Client], ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, then finish what was admitted; a second signal stops at once.

    The port is taken before `load` makes the client, and answers when it has. `ready` gets the URL then.
    Returns the exit code: 0, or 128 + the signal after a second one. Raises QtoolError for a port in use.
    """
    with _bind(address) as listener:
        return asyncio.run(_serve(listener, model, load(), ready))


async def _serve(listener: socket.socket, model: str, client: Client, ready: Callable[[str], None]) -> int:
    app = create_app(client, model)
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, backlog=_BACKLOG, lifespan="off")
    )
    serving = asyncio.ensure_future(server.serve([listener]))
    second: list[int] = []

    def on_signal(number: int) -> None:
        if server.should_exit:
            second.append(number)
            serving.cancel()
        server.should_exit = True
        client.loop.drain()

    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(number, on_signal, number)
    client.start()
    server.on_started = lambda: ready(_url(listener))
    try:
        await serving
        return 0
    except asyncio.CancelledError:
        return 128 + second[0]
    finally:
        client.loop.stop()
        await asyncio.to_thread(client.loop.join, _STOP_TIMEOUT_S)


class _Server(uvicorn.Server):
    """Uvicorn without its signal handling, which ends the process by the signal, not by exit code 0."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()


def _bind(address: Address) -> socket.socket:
    """A socket bound to the address, not listening yet, so that clients are refused until we are ready."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise QtoolError(f"host {address.host!r} is no address of this machine ({error})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise QtoolError(
            f"cannot listen on {address.host}:{address.port} ({error.strerror}); choose another --port"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
