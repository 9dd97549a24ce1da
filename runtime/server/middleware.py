"""What happens to a request before its route: a name, a key, a limit; and what is told after it."""

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qtool.runtime.server.errors import error_object
from qtool.runtime.server.logs import access

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics"})
"""What probes, scrapers and browsers read without a key: none of it shows a prompt or an answer."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class RequestRecord:
    """One request while it is handled; kept in the ASGI scope's state as `record`."""

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    """On `time.perf_counter`."""
    fields: dict[str, object] = field(default_factory=dict)
    """What its route adds to its line in the log and to its span; `error` is what an answer failed of."""


@dataclass(frozen=True)
class Handled:
    """A request that has ended."""

    record: RequestRecord
    method: str
    path: str
    route: str
    """As a template; "unmatched" when it never came to a route."""
    status: int
    """0 when the client went away before there was one."""
    headers: Headers
    """As they came."""
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether the server is to blame: an answer that fails in mid-stream has the status 200."""
        begun = self.status < HTTPStatus.BAD_REQUEST
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR or (begun and "error" in self.record.fields)


class RecordMiddleware:
    """Gives every request an id, the client's X-Request-Id or a new one, sends it back, and tells the end."""

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[Handled], None]]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        scope.setdefault("state", {})["record"] = record
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            handled = Handled(
                record,
                method=scope["method"],
                path=scope["path"],
                route=getattr(scope.get("route"), "path", "unmatched"),
                status=status,
                headers=headers,
                seconds=time.perf_counter() - record.arrived,
            )
            for observe in self._observers:
                observe(handled)


def log_request(handled: Handled) -> None:
    """Write a request's line into the log."""
    fields = {
        "request_id": handled.record.id,
        "method": handled.method,
        "path": handled.path,
        "status": handled.status,
        "seconds": round(handled.seconds, 6),
        **handled.record.fields,
    }
    access.info("request", extra={"fields": fields})


class KeyMiddleware:
    """Refuses what carries none of the keys, with 401, in a time that doesn't depend on how near it is."""

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in sorted(keys)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        body = error_object("the API key is missing or wrong; send 'Authorization: Bearer KEY'", 401)
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, never the first only
        return scheme.lower() == "bearer" and any(matches)


class SizeMiddleware:
    """Refuses a body above a limit with 413, before it is read where its length is told."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = f"the body is larger than {self._max_bytes} bytes; send a smaller one"
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told) > self._max_bytes:
            response = JSONResponse(error_object(problem, 413), 413, {"Connection": "close"})
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, problem)
            return message

        await self._app(scope, receive_counted, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
