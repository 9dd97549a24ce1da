"""From a generation to an HTTP response: whole or streamed, and cancelled when the client goes away."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from qtool.errors import QtoolError
from qtool.runtime.client import Piece
from qtool.runtime.request import ParameterError, RequestOptions, SamplingParams
from qtool.runtime.server.errors import DeadlineError
from qtool.runtime.server.metrics import AnswerTimer
from qtool.runtime.server.middleware import RequestRecord
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service

T = TypeVar("T")

_CLIENT_CLOSED_REQUEST = 499
_TIMEOUT_HEADER = "x-request-timeout"


class _ClientGoneError(Exception):
    """The client closed the connection: nobody reads the answer."""


@dataclass(frozen=True)
class Generation:
    """What is to be generated."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    options: RequestOptions
    timeout_s: float | None
    """From the request's arrival."""


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
    deadline = _deadline(service, request, record, generation)
    pieces = _measured(service, record, generation, deadline)
    try:
        if not stream:
            return await _unless_gone(request, _whole(pieces, writer))
        first = await _unless_gone(request, anext(pieces))
    except _ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return _EventStream(pieces, _events(first, pieces, writer))


def _deadline(
    service: Service, request: Request, record: RequestRecord, generation: Generation
) -> float | None:
    """When the request is given up, on `time.perf_counter`: by its body, its header or the server."""
    timeout_s = generation.timeout_s
    header = request.headers.get(_TIMEOUT_HEADER)
    if timeout_s is None and header is not None:
        try:
            timeout_s = float(header)
        except ValueError as error:
            raise ParameterError("timeout", f"the header holds {header!r:.40}, wanted seconds") from error
        if not 0 < timeout_s < float("inf"):
            raise ParameterError("timeout", f"must be finite and above 0, got {timeout_s}")
    if timeout_s is None:
        timeout_s = service.settings.request_timeout_s
    return None if timeout_s is None else record.arrived + timeout_s


async def _measured(
    service: Service, record: RequestRecord, generation: Generation, deadline: float | None
) -> AsyncGenerator[Piece, None]:
    """The pieces up to the deadline, counted and timed as they pass."""
    num_answers = len(generation.prompts) * generation.params.n
    num_prompt_tokens = sum(map(len, generation.prompts))
    timers = [AnswerTimer(service.metrics, record.arrived) for _ in range(num_answers)]
    service.metrics.prompt_tokens.inc(num_prompt_tokens)
    record.fields["prompt_tokens"] = num_prompt_tokens
    num_tokens = 0
    pieces = service.client.generate(generation.prompts, generation.params, generation.options)
    async with aclosing(pieces):
        while (piece := await _next_piece(pieces, deadline)) is not None:
            num_tokens += 1
            record.fields["completion_tokens"] = num_tokens
            timers[piece.index].token()
            if piece.finish_reason is not None:
                timers[piece.index].finish()
            yield piece


async def _next_piece(pieces: AsyncGenerator[Piece, None], deadline: float | None) -> Piece | None:
    seconds = None if deadline is None else max(0.0, deadline - time.perf_counter())
    try:
        async with asyncio.timeout(seconds):
            return await anext(pieces, None)
    except TimeoutError as error:
        raise DeadlineError("the request's deadline passed before its answer was complete") from error


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


async def _unless_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
