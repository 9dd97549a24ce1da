"""From a generation to an HTTP response: whole or streamed, and cancelled when the client goes away."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from qtool.errors import QtoolError
from qtool.runtime.client import Piece
from qtool.runtime.request import ParameterError, RequestOptions, SamplingParams
from qtool.runtime.server.disconnect import CLIENT_CLOSED_REQUEST, ClientGoneError, unless_gone
from qtool.runtime.server.measuring import AnswersMeter
from qtool.runtime.server.middleware import RequestRecord
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service

T = TypeVar("T")

_TIMEOUT_HEADER = "x-request-timeout"


@dataclass(frozen=True)
class Generation:
    """What is to be generated."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    options: RequestOptions


class Writer(Protocol):
    """Writes one answer in the dialect of its endpoint, while its pieces come."""

    def opening(self) -> Sequence[str]:
        """Events of a stream before any piece."""
        ...

    def push(self, piece: Piece) -> Sequence[str]:
        """Take in a piece; the events that it makes."""
        ...

    def closing(self) -> Sequence[str]:
        """Events after the last piece."""
        ...

    def failing(self, error: QtoolError) -> Sequence[str]:
        """Events instead of the rest, when the status is sent already."""
        ...

    def whole(self) -> Json:
        """The body of the whole answer."""
        ...


async def respond(
    service: Service, request: Request, generation: Generation, writer: Writer, *, stream: bool
) -> Response:
    """Answer every prompt. Errors up to the first token are raised, so that they set the status."""
    record: RequestRecord = request.state.record
    options = replace(
        generation.options, timeout_s=request_timeout(service, request, generation.options.timeout_s)
    )
    pieces = service.client.generate(generation.prompts, generation.params, options)
    measured = _measured(service, record, generation, pieces)
    try:
        if not stream:
            return await unless_gone(request, _whole(measured, writer))
        first = await unless_gone(request, anext(measured))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _EventStream(measured, _events(first, measured, writer))


def request_timeout(service: Service, request: Request, given: float | None) -> float | None:
    """Seconds that the request has, as `given` in its body, by its header or the server."""
    if given is not None:
        return given
    header = request.headers.get(_TIMEOUT_HEADER)
    if header is None:
        return service.settings.request_timeout_s
    try:
        return float(header)
    except ValueError as error:
        raise ParameterError("timeout", f"the header holds {header!r:.40}, wanted seconds") from error


async def _measured(
    service: Service, record: RequestRecord, generation: Generation, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece, None]:
    """The pieces, measured as they pass."""
    meter = AnswersMeter(service.metrics, record, generation.prompts, generation.params)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                meter.take(piece)
                yield piece
    except QtoolError as error:
        meter.fail(error)
        raise


async def _whole(pieces: AsyncGenerator[Piece, None], writer: Writer) -> JSONResponse:
    async with aclosing(pieces):
        async for piece in pieces:
            writer.push(piece)
    return JSONResponse(writer.whole())


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], writer: Writer
) -> AsyncGenerator[str, None]:
    for event in (*writer.opening(), *writer.push(first)):
        yield event
    try:
        async for piece in pieces:
            for event in writer.push(piece):
                yield event
    except QtoolError as error:
        for event in writer.failing(error):
            yield event
    else:
        for event in writer.closing():
            yield event


class _EventStream(StreamingResponse):
    """Streams events; however it ends, the generation behind them is closed, which cancels it."""

    def __init__(self, pieces: AsyncGenerator[Piece, None], events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await super().__call__(scope, receive, send)
