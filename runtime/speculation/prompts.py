"""A file of somebody's own prompts, to measure speculation with."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qtool.errors import UsageError
from qtool.runtime.engines.contract import Engine
from qtool.runtime.request import ParameterError, SamplingParams
from qtool.runtime.speculation.measure import new_loop
from qtool.runtime.tokenizer import Tokenizer


def read_prompts(path: Path, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids of prompts, by file and line: a text file has one a line, asked as a user's message; in a
    JSONL file each line has ``messages``, or a ``prompt`` to continue. UsageError for a file with none, or a
    line that is something else or that the model's template refuses."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the prompts cannot be read ({error})") from error
    prompts = {}
    for number, line in enumerate(text.split("\n"), 1):  # a string in JSON may hold other line ends
        place = f"{path}:{number}"
        if not line.strip():
            continue
        with _told(place):
            if path.suffix == ".jsonl":
                prompts[place] = _parse(line, place, tokenizer)
            else:
                prompts[place] = tokenizer.encode_chat([{"role": "user", "content": line}])
    if not prompts:
        raise UsageError(f"{path}: holds no prompts; write one a line")
    return prompts


def refuse_misfits(prompts: Mapping[str, list[int]], engine: Engine, params: SamplingParams) -> None:
    """Raise UsageError, with its place, for a prompt that with its answer could never be served."""
    scheduler = new_loop(engine, None, len(prompts)).scheduler
    for place, prompt in prompts.items():
        with _told(place):
            scheduler.refuse_misfit(len(prompt), params)


def _parse(line: str, place: str, tokenizer: Tokenizer) -> list[int]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: is not valid JSON ({error})") from error
    match body:
        case {"messages": [_, *_] as messages} if all(isinstance(message, dict) for message in messages):
            return tokenizer.encode_chat(messages)
        case {"prompt": str(text)}:
            return tokenizer.encode(text)
    raise UsageError(f"{place}: has neither a list of messages nor a prompt, which is a text")


@contextmanager
def _told(place: str) -> Iterator[None]:
    try:
        yield
    except ParameterError as error:
        raise UsageError(f"{place}: {error}") from error
