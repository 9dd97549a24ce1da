"""The server as a process: its socket, its signals, and an end that loses no admitted request."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from qtool.core import lazy
from qtool.errors import QtoolError
from qtool.runtime.client import Client
from qtool.runtime.server.app import create_app
from qtool.runtime.server.errors import answer_loading
from qtool.runtime.server.logs import set_up_logging
from qtool.runtime.server.middleware import Handled
from qtool.runtime.server.settings import ServerSettings

T = TypeVar("T")

_BACKLOG = 2048
_STOP_TIMEOUT_S = 5.0
_FAREWELL_S = 1.0
"""For connections to get their last bytes, when the server ends before they do."""


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000


def serve(
    address: Address,
    model: str,
    load: Callable[[], Client],
    ready: Callable[[str], None],
    settings: ServerSettings | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then finish what was admitted; a second signal stops at once.

    The port is taken before `load` makes the client, in a thread of its own; until it has, everything is
    answered with 503. `ready` gets the URL then. Returns the exit code: 0, or 128 + the signal when something
    was cut short: loading, or requests by a second signal or the drain timeout. Raises what `load` raises,
    and QtoolError for a port in use or when the engine has failed, its requests having been told; UsageError
    when traces are wanted and the extra for them is missing.
    """
    settings = settings or ServerSettings()
    with _bind(address) as listener, _tracing(settings, model) as observers:
        set_up_logging(settings.log_format)
        return asyncio.run(_Process(listener, model, load, ready, settings, observers).run())


@contextmanager
def _tracing(settings: ServerSettings, model: str) -> Iterator[Sequence[Callable[[Handled], None]]]:
    """What records requests as spans, if anything shall; what it still holds is sent at the end."""
    if settings.otlp_endpoint is None:
        yield ()
        return
    tracer = lazy.load("qtool.runtime.server.tracing:make_tracer", "otel")(settings.otlp_endpoint, model)
    try:
        yield (tracer.record,)
    finally:
        tracer.close()


class _Process:
    """The server from its start to its end, as signals and loading move it on."""

    def __init__(
        self,
        listener: socket.socket,
        model: str,
        load: Callable[[], Client],
        ready: Callable[[str], None],
        settings: ServerSettings,
        observers: Sequence[Callable[[Handled], None]],
    ) -> None:
        self._listener = listener
        self._model = model
        self._load = load
        self._ready = ready
        self._settings = settings
        self._observers = observers
        self._app: ASGIApp = answer_loading
        self._server = _Server(
            uvicorn.Config(
                self._answer,
                log_config=None,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                lifespan="off",
                ws="none",
                interface="asgi3",
            )
        )
        self._client: Client | None = None
        self._signals: list[int] = []
        self._at_once = asyncio.Event()
        """Set when nothing that is unfinished shall be waited for."""

    async def run(self) -> int:
        """Serve; the exit code."""
        events = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            events.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._server.serve([self._listener]))
        at_once = asyncio.ensure_future(self._at_once.wait())
        try:
            await self._start(at_once)
            await asyncio.wait({serving, at_once}, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            return 0 if serving.done() else 128 + self._signals[-1]
        finally:
            at_once.cancel()
            await self._end(serving)

    async def _start(self, at_once: asyncio.Task[Literal[True]]) -> None:
        """Load, and take requests from then on; returns early when a signal comes first."""
        loading = asyncio.ensure_future(_in_daemon(self._load))
        await asyncio.wait([loading, at_once], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return
        client = loading.result()
        events = asyncio.get_running_loop()

        def leave() -> None:  # called in the loop's thread
            events.call_soon_threadsafe(self._leave)

        client.loop.on_failure = leave
        client.start()
        self._app = create_app(client, self._model, self._settings, self._observers)
        self._client = client
        self._ready(_url(self._listener))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def _leave(self) -> None:
        """End once all connections have their answers."""
        self._server.should_exit = True

    def _raise_failure(self) -> None:
        failure = None if self._client is None else self._client.loop.failure
        if failure is not None:
            raise QtoolError(
                f"the engine failed ({type(failure).__name__}: {failure}); the log above says where; its "
                "requests were told, start the server again"
            ) from failure

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._server.should_exit = True
        if self._client is None or len(self._signals) > 1:
            self._at_once.set()
            return
        self._client.loop.drain()
        if self._settings.drain_timeout_s is not None:
            asyncio.get_running_loop().call_later(self._settings.drain_timeout_s, self._at_once.set)

    async def _end(self, serving: asyncio.Future[None]) -> None:
        self._server.should_exit = True
        if self._client is None:
            self._server.force_exit = True
        else:
            self._client.loop.stop()  # what is unfinished fails, and its clients are told
            await asyncio.to_thread(self._client.loop.join, _STOP_TIMEOUT_S)
        await asyncio.wait({serving}, timeout=_FAREWELL_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _in_daemon(work: Callable[[], T]) -> T:
    """The result of `work`, in a thread that doesn't keep the process alive: loading can't be interrupted."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    events = asyncio.get_running_loop()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            events.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="qtool-load", daemon=True).start()
    return await done


class _Server(uvicorn.Server):
    """Uvicorn without its signal handling, which ends the process by the signal, not by exit code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(address: Address) -> socket.socket:
    """A socket bound to the address, not listening yet."""
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
