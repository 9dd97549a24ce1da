"""The server as a process under many clients: those that leave, those that come again, and its own end."""

import asyncio
import json
import random
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.runtime.test_process import num_admitted, process, url_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads memory as Linux does")


def completion(max_tokens: int, *, stream: bool, request_id: str = "") -> bytes:
    """A request, as it goes over the wire."""
    prompt = f"{request_id} of many"
    fields = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    body = json.dumps({**fields, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def free_of_work(url: str) -> bool:
    """Whether nothing runs or waits and every block of the pool is free."""
    page = httpx.get(f"{url}/metrics").text.splitlines()
    return num_admitted(url) == 0 and "qtool_kv_cache_usage_ratio 0.0" in page


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of its own, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def test_clients_that_disconnect_at_random_leave_nothing_behind(tokenizer_folder: Path) -> None:
    async def leave(port: int, number: int) -> None:
        choose = random.Random(number)
        await asyncio.sleep(choose.uniform(0, 0.5))
        async with connected(port) as (reader, writer):
            request = completion(200, stream=number % 2 == 0, request_id=str(number))
            whole = choose.random() < 0.9
            writer.write(request if whole else request[: choose.randrange(len(request))])
            await asyncio.sleep(choose.uniform(0, 0.5))
            if whole and number % 6 == 0:
                await reader.read(1)  # a stream that has begun
            if number % 5 == 0:
                writer.transport.abort()  # with a reset

    async def all_leave(port: int) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*(leave(port, number) for number in range(200)))

    with process(tokenizer_folder, 0.002) as server:
        url = url_of(server)
        assert free_of_work(url)
        asyncio.run(all_leave(port_of(url)))
        for _ in range(100):  # cancelled within a step each; the machine may be slow
            if free_of_work(url):
                break
        assert free_of_work(url)
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"model": "model", "prompt": "x", "max_tokens": 3, "ignore_eos": True},
        )
        assert answer.json()["usage"]["completion_tokens"] == 3


async def send_many(port: int, count: int, connections: int) -> None:
    """Requests over some connections that are kept open."""

    async def send() -> None:
        async with connected(port) as (reader, writer):
            for number in range(count // connections):
                writer.write(completion(1, stream=False, request_id=str(number)))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                (length,) = re.findall(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length))

    async with asyncio.timeout(120):
        await asyncio.gather(*(send() for _ in range(connections)))


def test_five_thousand_requests_leave_the_memory_as_it_was(tokenizer_folder: Path) -> None:
    with process(tokenizer_folder, 0) as server:
        url = url_of(server)
        statm = Path(f"/proc/{server.pid}/statm")
        asyncio.run(send_many(port_of(url), 800, 8))
        before = int(statm.read_text().split()[1])
        asyncio.run(send_many(port_of(url), 5000, 8))
        assert int(statm.read_text().split()[1]) <= 1.05 * before
        assert free_of_work(url)


@dataclass(frozen=True)
class Answer:
    """What a client has read when its connection ends."""

    request_id: str
    text: bytes

    @property
    def status(self) -> str:
        """Empty when the connection ended before any."""
        return self.text[9:12].decode()

    @property
    def complete(self) -> bool:
        """Whether all of it came, by its own account."""
        head, _, body = self.text.partition(b"\r\n\r\n")
        if b"chunked" in head:
            return b"data: [DONE]" in body and body.endswith(b"0\r\n\r\n")
        return b'"finish_reason":"length"' in body


async def ask_until_the_end(port: int, client: int, server: "subprocess.Popen[str]") -> list[Answer]:
    """One request after the other, each in its own connection, until none is taken any more."""
    answers: list[Answer] = []
    while server.poll() is None:
        request_id = f"{client}-{len(answers)}"
        request = completion(10, stream=client % 2 == 0, request_id=request_id)
        text = b""
        try:
            async with connected(port) as (reader, writer):
                writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                text = await reader.read()
        except ConnectionRefusedError:
            break
        except ConnectionResetError:  # it was in the backlog of the socket that was closed
            pass
        answers.append(Answer(request_id, text))
    return answers


def test_sigterm_under_load_loses_no_admitted_request(tokenizer_folder: Path) -> None:
    async def load(server: "subprocess.Popen[str]", port: int) -> tuple[Sequence[Answer], str]:
        assert server.stderr is not None
        log = asyncio.ensure_future(
            asyncio.to_thread(server.stderr.read)
        )  # a full pipe would stop the server
        asking = [asyncio.ensure_future(ask_until_the_end(port, client, server)) for client in range(24)]
        await asyncio.sleep(1)
        server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            return [answer for answers in await asyncio.gather(*asking) for answer in answers], await log

    with process(tokenizer_folder, 0.005, log_format="json") as server:
        answers, log = asyncio.run(load(server, port_of(url_of(server))))
        server.wait(timeout=30)
    assert server.returncode == 0
    records = [json.loads(line) for line in log.splitlines()]
    taken = {record["request_id"]: record for record in records if record["message"] == "request"}
    assert {record["status"] for record in taken.values()} <= {200, 503}
    assert len([answer for answer in answers if answer.complete]) >= 24
    for answer in answers:
        if answer.request_id not in taken:  # came when the socket was closed: nobody has read it
            assert answer.text == b""
        elif taken[answer.request_id]["status"] == 200:
            assert answer.complete, answer
        else:
            assert answer.status == "503", answer
