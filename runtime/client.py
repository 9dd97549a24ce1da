"""The engine loop as asyncio sees it: prompts in, pieces of text out."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from qtool.runtime.detokenize import TextStream
from qtool.runtime.engines.contract import Engine, Floats
from qtool.runtime.failures import GenerationError
from qtool.runtime.logprobs import TokenLogprobs
from qtool.runtime.loop import EngineLoop, Output
from qtool.runtime.request import FinishReason, RequestOptions, SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.tokenizer import Tokenizer

_DEFAULTS = RequestOptions()


@dataclass(frozen=True)
class Piece:
    """What one more token of one prompt's answer gave."""

    index: int
    """Which of the answers: prompt · n + choice."""
    text: str
    """May be empty: half a character, or what could become a stop string."""
    finish_reason: FinishReason | None
    token: int
    """The token itself; an end-of-sequence token gives no text."""
    logprobs: TokenLogprobs | None = None
    """The token's, when the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of every token of the prompt, with the first piece of its first choice; the first token has none."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache held."""
    num_accepted_drafts: int = 0
    """Tokens of the answer so far that were drafts."""
    num_rejected_drafts: int = 0
    """Drafts so far that were verified and are not in the answer."""


class Client:
    """Runs an engine loop, and turns its outputs into text on the caller's side, where no step waits.

    Belongs to the asyncio event loop in which `generate` is called.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        speculator: Speculator | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = engine.vocab_size
        self.speculates = speculator is not None
        self.loop = EngineLoop(engine, config, self._deliver, speculator=speculator)
        self.max_tokens_per_sequence = self.loop.scheduler.max_tokens_per_sequence
        self._events: asyncio.AbstractEventLoop | None = None
        self._queues: dict[int, asyncio.Queue[Output]] = {}

    def start(self) -> None:
        """Start the engine loop; called inside the event loop that will read its outputs."""
        self._events = asyncio.get_running_loop()
        self.loop.start()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        options: RequestOptions = _DEFAULTS,
    ) -> AsyncGenerator[Piece, None]:
        """Answer every prompt, in one batch where they fit; a piece for each token, as it is made.

        Close the iterator (`contextlib.aclosing`) to cancel what is unfinished. Raises ParameterError when
        a prompt can never fit, NotAdmittingError or GenerationError when the server can't answer.
        """
        queue: asyncio.Queue[Output] = asyncio.Queue()
        decoder = self.tokenizer.showing_special_tokens if options.keep_special_tokens else self.tokenizer
        streams = [
            TextStream(decoder, prompt, params.stop, params.min_tokens)
            for prompt in prompts
            for _ in range(params.n)
        ]
        request_ids = self.loop.submit(prompts, params, options)
        unfinished = {request_id: index for index, request_id in enumerate(request_ids)}
        self._queues.update(dict.fromkeys(request_ids, queue))
        try:
            while unfinished:
                output = await queue.get()
                if output.request_id not in unfinished:  # a stop string ended it on this side
                    continue
                index = unfinished[output.request_id]
                piece = _next_piece(index, streams[index], output, params.stop_token_ids)
                if piece.finish_reason is not None:
                    self._leave(unfinished, output)
                yield piece
        finally:
            for request_id in unfinished:
                del self._queues[request_id]
                self.loop.cancel(request_id)

    async def embed(self, prompts: Sequence[Sequence[int]], options: RequestOptions) -> list[Floats]:
        """The embedding [hidden] of every prompt, pooled as `options` says, each of length 1.

        Raises UsageError when the engine gives no hidden states, ParameterError when a prompt can never fit,
        NotAdmittingError or GenerationError when the server can't answer. Cancelling it gives up what is
        unfinished.
        """
        queue: asyncio.Queue[Output] = asyncio.Queue()
        request_ids = self.loop.submit(prompts, SamplingParams(max_tokens=1), options)
        self._queues.update(dict.fromkeys(request_ids, queue))
        found: dict[int, Floats] = {}
        try:
            while len(found) < len(request_ids):
                output = await queue.get()
                if output.embedding is None:
                    raise output.error or GenerationError("the request failed")
                found[output.request_id] = output.embedding
        finally:
            for request_id in request_ids:
                del self._queues[request_id]
                if request_id not in found:
                    self.loop.cancel(request_id)
        return [found[request_id] for request_id in request_ids]

    def _leave(self, unfinished: dict[int, int], output: Output) -> None:
        del unfinished[output.request_id]
        del self._queues[output.request_id]
        if output.finish_reason is None:
            self.loop.cancel(output.request_id)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Called in the engine loop's thread, once a step: waking the event loop costs a system call."""
        assert self._events is not None
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)


def _next_piece(index: int, stream: TextStream, output: Output, stop_token_ids: frozenset[int]) -> Piece:
    if output.token is None:
        raise output.error or GenerationError("the request failed")
    reason = output.finish_reason
    # A token that ends the sequence is no text; the last one that a grammar allows is.
    text = "" if reason == "stop" and output.token in stop_token_ids else stream.push(output.token)
    if reason is not None and not stream.stopped:
        text += stream.finish()
    if stream.stopped:
        reason = "stop"
    return Piece(
        index,
        text,
        reason,
        output.token,
        output.logprobs,
        output.prompt_logprobs,
        output.num_cached_tokens,
        output.num_accepted_drafts,
        output.num_rejected_drafts,
    )
