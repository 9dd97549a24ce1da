"""Work that is given up when the client goes away."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499


class ClientGoneError(Exception):
    """The client closed the connection: nobody reads the answer."""


async def unless_gone(request: Request, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
