"""From a generation to an HTTP response: whole or streamed, and cancelled when the client goes away."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from qtool.errors import QtoolError
from qtool.runtime.client import Piece
from qtool.runtime.request import SamplingParams
from qtool.runtime.server.errors import error_object
from qtool.runtime.server.metrics import AnswerTimer
from qtool.runtime.server.middleware import RequestRecord
from qtool.runtime.server.responses import DONE, Answer, Shape, Usage, event
from qtool.runtime.server.service import Service

T = TypeVar("T")

_CLIENT_CLOSED_REQUEST = 499


class _ClientGoneError(Exception):
    """The client closed the connection: nobody reads the answer."""


async def respond(
    service: Service,
    request: Request,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    shape: Shape,
    *,
    stream: bool,
) -> Response:
    """Answer every prompt. Errors up to the first token are raised, so that they set the status."""
    usage = Usage(sum(len(prompt) for prompt in prompts))
    record: RequestRecord = request.state.record
    pieces = _measured(service, record, service.client.generate(prompts, params), usage, len(prompts))
    try:
        if not stream:
            return await _unless_gone(request, _whole(pieces, shape, usage, len(prompts)))
        first = await _unless_gone(request, anext(pieces))
    except _ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return _EventStream(pieces, _events(first, pieces, shape, usage, len(prompts)))


async def _measured(
    service: Service,
    record: RequestRecord,
    pieces: AsyncGenerator[Piece, None],
    usage: Usage,
    num_prompts: int,
) -> AsyncGenerator[Piece, None]:
    """The pieces, counted and timed as they pass."""
    timers = [AnswerTimer(service.metrics, record.arrived) for _ in range(num_prompts)]
    service.metrics.prompt_tokens.inc(usage.prompt_tokens)
    record.fields["prompt_tokens"] = usage.prompt_tokens
    async with aclosing(pieces):
        async for piece in pieces:
            usage.completion_tokens += 1
            record.fields["completion_tokens"] = usage.completion_tokens
            timers[piece.index].token()
            if piece.finish_reason is not None:
                timers[piece.index].finish()
            yield piece


async def _whole(
    pieces: AsyncGenerator[Piece, None], shape: Shape, usage: Usage, num_prompts: int
) -> JSONResponse:
    answers = [Answer() for _ in range(num_prompts)]
    async with aclosing(pieces):
        async for piece in pieces:
            answer = answers[piece.index]
            answer.text += piece.text
            answer.finish_reason = piece.finish_reason
    return JSONResponse(shape.whole(answers, usage))


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], shape: Shape, usage: Usage, num_prompts: int
) -> AsyncGenerator[str, None]:
    for index in range(num_prompts):
        if (opening := shape.opening(index)) is not None:
            yield event(opening)
    try:
        for chunk in _chunks(first, shape):
            yield chunk
        async for piece in pieces:
            for chunk in _chunks(piece, shape):
                yield chunk
    except QtoolError as error:  # the status is sent, so the error is an event; clients raise it
        yield event(error_object(str(error), 500))
    else:
        if shape.include_usage:
            yield event(shape.closing(usage))
    yield DONE


def _chunks(piece: Piece, shape: Shape) -> list[str]:
    return [event(chunk) for chunk in shape.pieces(piece.index, piece.text, piece.finish_reason)]


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
