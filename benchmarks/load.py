"""A closed load on an OpenAI-compatible server: so many streams at once, what each of them saw.

Plain sockets instead of a client library: at a thousand tokens a second a library's own work would be part
of what is measured, on the cores that the server needs.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """One streamed completion. Times in seconds from when the load began."""

    sent: float
    arrivals: tuple[float, ...]
    """Of each event that carried text."""
    num_tokens: int
    """As the server's usage counts them."""

    @property
    def ttft(self) -> float:
        """From sending to the first text."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how many tokens are wanted."""

    prompt: tuple[int, ...]
    max_tokens: int
    delay: float = 0.0
    """Seconds after the load's begin."""


def run_load(port: int, model: str, requests: Sequence[Request]) -> list[Stream]:
    """Send the requests, each in a connection of its own, and wait for them all."""
    return asyncio.run(_run(port, model, requests))


async def _run(port: int, model: str, requests: Sequence[Request]) -> list[Stream]:
    begin = time.perf_counter()
    return list(await asyncio.gather(*(_stream(port, model, request, begin) for request in requests)))


async def _stream(port: int, model: str, request: Request, begin: float) -> Stream:
    await asyncio.sleep(request.delay)
    body = json.dumps(
        {
            "model": model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    sent = time.perf_counter() - begin
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    status = await reader.readline()
    arrivals: list[float] = []
    num_tokens = 0
    answer = [status]
    while line := await reader.readline():
        answer.append(line)
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("choices") and event["choices"][0].get("text"):
            arrivals.append(time.perf_counter() - begin)
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    writer.close()
    if b" 200 " not in status or num_tokens != request.max_tokens or not arrivals:
        raise RuntimeError(
            f"port {port}: {num_tokens} of {request.max_tokens} tokens: {b''.join(answer)[:800]!r}"
        )
    return Stream(sent, tuple(arrivals), num_tokens)
