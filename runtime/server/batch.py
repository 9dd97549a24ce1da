"""OpenAI's batch files, answered without HTTP: a request a line in, a response a line out, resumable."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qtool.errors import QtoolError, UsageError
from qtool.runtime.request import ParameterError
from qtool.runtime.server.chat_body import ChatBody
from qtool.runtime.server.completion_body import CompletionBody
from qtool.runtime.server.errors import error_parts, first_problem
from qtool.runtime.server.generation import Generation, Writer
from qtool.runtime.server.generation_routes import (
    chat_generation,
    chat_writer,
    completion_generation,
    completion_writer,
)
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service

_ROUTES = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class BatchRequest:
    """One line of a batch file."""

    custom_id: str
    url: str
    body: Json


def read_requests(path: Path) -> list[BatchRequest]:
    """A file's requests. Raises UsageError, with the line, for what is none, and for an id given twice."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a string in JSON may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the requests cannot be read ({error})") from error
    requests = [_request(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    counts = Counter(request.custom_id for request in requests)
    if twice := [custom_id for custom_id, count in counts.items() if count > 1]:
        raise UsageError(
            f"{path}: custom_id {twice[0]!r} is given {counts[twice[0]]} times; it has to be one's own"
        )
    return requests


def read_answered(path: Path) -> set[str]:
    """Ids that a file of responses holds already; a line that was cut short is removed from its end."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return {response["custom_id"] for response in _responses(whole)}


def num_failed(path: Path) -> int:
    """How many responses of a file say that their request could not be served."""
    return sum(line["response"]["status_code"] != 200 for line in _responses(path.read_bytes()))


def _responses(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines of a file of responses, in bytes: text ends lines at U+2028, too, which answers may hold."""
    return map(json.loads, content.splitlines())


async def run_batch(
    service: Service, requests: Sequence[BatchRequest], concurrency: int, write: Callable[[Json], None]
) -> None:
    """Answer every request, `concurrency` of them at once; `write` gets each response as it is complete.

    A request that can't be served gets a response that says so. Raises what stops the engine.
    """
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            status, body = await _answer(service, request)
            write(_line(request, status, body))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())


async def _answer(service: Service, request: BatchRequest) -> tuple[int, Json]:
    try:
        generation, writer = await asyncio.to_thread(_prepare, service, request)
        pieces = service.client.generate(generation.prompts, generation.params, generation.options)
        async with aclosing(pieces):
            async for piece in pieces:
                writer.push(piece)
        return 200, writer.whole()
    except QtoolError as error:
        status, body, _ = error_parts(error)
        if status >= 500 and service.client.loop.refusal is not None:
            raise
        return status, body


def _prepare(service: Service, request: BatchRequest) -> tuple[Generation, Writer]:
    try:
        if request.url == "/v1/chat/completions":
            chat = ChatBody.model_validate(request.body)
            _check(service, chat)
            generation = chat_generation(service, chat)
            return generation, chat_writer(service, chat, generation)
        completion = CompletionBody.model_validate(request.body)
        _check(service, completion)
        generation = completion_generation(service, completion)
        return generation, completion_writer(service, completion, generation)
    except ValidationError as error:
        param, message = first_problem(error.errors()[0])
        raise ParameterError(param or "body", message) from error


def _check(service: Service, body: ChatBody | CompletionBody) -> None:
    service.refuse_other(body.model)
    if body.stream:
        raise ParameterError("stream", "has no place in a batch; leave it out")


def _line(request: BatchRequest, status: int, body: Json) -> Json:
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }


def _request(place: str, line: str) -> BatchRequest:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: is not valid JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        raise UsageError(f"{place}: has no custom_id, by which its response is found; add one")
    if found.get("url") not in _ROUTES or found.get("method") != "POST":
        raise UsageError(
            f"{place}: asks for {found.get('method')} {found.get('url')}, wanted POST and one of "
            f"{', '.join(_ROUTES)}"
        )
    if not isinstance(found.get("body"), dict):
        raise UsageError(f"{place}: has no body, the request itself; add one")
    return BatchRequest(found["custom_id"], found["url"], found["body"])
