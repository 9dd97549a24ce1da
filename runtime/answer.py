"""One answer from an engine, without a server."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from qtool.runtime.client import Client
from qtool.runtime.engines.contract import Engine
from qtool.runtime.request import FinishReason, SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """A complete answer and what it took."""

    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int


def answer(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    show: Callable[[str], None],
) -> Answer:
    """Continue a prompt; `show` gets each piece of text as it comes.

    Raises ParameterError for a prompt that can't fit, GenerationError when the engine fails.
    """
    return asyncio.run(_answer(Client(engine, tokenizer, SchedulerConfig()), prompt, params, show))


async def _answer(
    client: Client, prompt: Sequence[int], params: SamplingParams, show: Callable[[str], None]
) -> Answer:
    client.start()
    texts: list[str] = []
    reason: FinishReason | None = None
    try:
        async with aclosing(client.generate([prompt], params)) as pieces:
            async for piece in pieces:
                texts.append(piece.text)
                reason = piece.finish_reason
                show(piece.text)
    finally:
        client.loop.stop()
        client.loop.join()
    return Answer("".join(texts), reason, len(prompt), len(texts))
