"""The engine loop: one thread that schedules, runs and commits steps while there are sequences."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

import numpy as np

from qtool.runtime.blocks import BlockManager
from qtool.runtime.engines.contract import Bools, Engine, Floats, Step, slots_of
from qtool.runtime.events import Event, Observer, SequenceDone, SpeculationDone, StepDone
from qtool.runtime.failures import GenerationError, NotAdmittingError, OverloadedError
from qtool.runtime.logprobs import TokenLogprobs
from qtool.runtime.next_token import Extension, NextToken, extend, report_prompts
from qtool.runtime.pooling import Pooler, is_pooled, refuse_without
from qtool.runtime.request import (
    FinishReason,
    RequestOptions,
    SamplingParams,
    SequenceState,
    refuse_ids_outside,
)
from qtool.runtime.scheduler import Chunk, Scheduler, SchedulerConfig
from qtool.runtime.slo import Pacer
from qtool.runtime.speculation.contract import Draft
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.steptime import StepTimeModel
from qtool.runtime.sweep import measure_step_times

_log = logging.getLogger(__name__)
_DEFAULTS = RequestOptions()
_UNNUMBERED = -1


@dataclass(frozen=True)
class Output:
    """What a step did for one request."""

    request_id: int
    token: int | None
    """The new token; None when the request failed. An end-of-sequence token comes with reason "stop"."""
    finish_reason: FinishReason | None = None
    error: NotAdmittingError | GenerationError | None = None
    """Why the request failed. No output follows one with an error or a finish reason."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of every token of the prompt, with the first output of its first choice; the first token has none."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache held."""
    num_accepted_drafts: int = 0
    """Tokens of the answer so far that were drafts."""
    num_rejected_drafts: int = 0
    """Drafts so far that were verified and are not in the answer."""
    embedding: Floats | None = None
    """[hidden], of length 1: what a request with `pooling` gets, once, instead of tokens."""


@dataclass(frozen=True)
class LoopStats:
    """Counts: of this moment up to the free blocks, then since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_hit_tokens: int
    """Prompt tokens that the prefix cache held, of `num_queried_tokens` in all."""
    num_queried_tokens: int
    num_refused: int
    """Requests that were refused because of load."""
    num_steps: int
    num_computed_tokens: int
    num_generated_tokens: int


class EngineLoop:
    """Serves requests on one engine, in its own thread; `submit` and the rest may be called from any.

    `deliver` is called in that thread with the outputs of each step; it must be quick and must not raise.
    With an objective (`SchedulerConfig.slo`) some steps are run and timed when the loop is made. With a
    speculator, drafts are verified beside the tokens of sequences that decode; no answer is another by that.
    """

    def __init__(
        self,
        engine: Engine,
        config: SchedulerConfig,
        deliver: Callable[[Sequence[Output]], None],
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
    ) -> None:
        self._engine = engine
        self._speculator = speculator
        self._pooler = Pooler(engine.hidden_states)
        self._deliver = deliver
        self._clock = clock
        blocks = BlockManager(engine.num_blocks, engine.block_size)
        self.scheduler = Scheduler(config, blocks, engine.max_context)
        """To be changed by the loop's thread alone."""
        if config.slo is not None:
            model = StepTimeModel(measure_step_times(engine, config))
            self.scheduler.pacer = Pacer(config.slo, model)
        self.observers: list[Observer] = []
        """Called with every event in the loop's thread; must be quick and must not raise."""
        self._sequences: dict[int, SequenceState] = {}
        self._ids = itertools.count()
        self._inbox: SimpleQueue[SequenceState | int | None] = SimpleQueue()
        """New sequences, ids to cancel, and None to wake up the thread."""
        self._lock = threading.Lock()
        self._num_unfinished = 0
        self.refusal: str | None = None
        """Why new requests are not admitted: None while they are. Changed under the lock, so that none slips
        in behind the last."""
        self.failure: Exception | None = None
        """What the engine died of."""
        self.on_failure: Callable[[], None] = _do_nothing
        """Called in the loop's thread when the engine has died and all requests are told: the process should
        end then, and be started again."""
        self._num_refused = self._num_steps = self._num_computed = self._num_generated = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="qtool-engine-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, options: RequestOptions = _DEFAULTS
    ) -> list[int]:
        """Queue every prompt, all or none, and return an id for each choice, prompt by prompt.

        By its id a choice's outputs are known, and it can be cancelled. Raises ParameterError when a prompt
        could never be served, UsageError for an embedding that the engine can't give, NotAdmittingError when
        none is taken any more.
        """
        if options.pooling is not None:
            refuse_without(self._engine.hidden_states)
        params.refuse_tokens_outside(self._engine.vocab_size)
        for prompt in prompts:
            refuse_ids_outside("prompt", prompt, self._engine.vocab_size)
            num_answer = 0 if options.pooling is not None else params.max_tokens
            self.scheduler.refuse_misfit(len(prompt), params, num_answer)
        sequences = [sequence for prompt in prompts for sequence in self._choices(prompt, params, options)]
        lengths = [len(prompt) for prompt in prompts]
        with self._lock:
            if self.refusal is not None:
                raise NotAdmittingError(self.refusal)
            try:
                self.scheduler.refuse_overload(self._num_unfinished, lengths, params.n)
            except OverloadedError:
                self._num_refused += 1
                raise
            self._num_unfinished += len(sequences)
            for sequence in sequences:
                sequence.id = next(self._ids)
                self._inbox.put(sequence)
        return [sequence.id for sequence in sequences]

    def _choices(
        self, prompt: Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> Iterator[SequenceState]:
        now = self._clock()
        first = SequenceState(_UNNUMBERED, list(prompt), params, options, arrived=now)
        yield first
        others = replace(params, prompt_logprobs=None)
        for choice in range(1, params.n):
            yield SequenceState(_UNNUMBERED, list(prompt), others, options, first, choice, now)

    def cancel(self, request_id: int) -> None:
        """Drop a request before the next step; its outputs end without a last one. Ended ones are ignored."""
        self._inbox.put(request_id)

    def drain(self) -> None:
        """Admit nothing more; the thread ends when what was admitted has finished."""
        self._refuse("the server is shutting down; send the request to another")

    def stop(self) -> None:
        """Admit nothing more and end after the current step; what has not finished fails."""
        self._stopping = True
        self.drain()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end, for `timeout` seconds at most; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stats(self) -> LoopStats:
        """Counts, read without stopping the loop: each is right, but a step may lie between two."""
        scheduler = self.scheduler
        return LoopStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=scheduler.blocks.num_blocks,
            num_free_blocks=scheduler.blocks.num_free,
            num_preemptions=scheduler.num_preemptions,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_queried_tokens=scheduler.num_queried_tokens,
            num_refused=self._num_refused,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._num_generated,
        )

    def receive(self, wait: bool = True) -> bool:
        """Take in what callers sent; whether there is something to run.

        With `wait`, there is unless the loop is over: it waits for requests. Called by the thread before
        each step, or by hand as `step` is.
        """
        while True:
            while not self._inbox.empty():
                self._accept(self._inbox.get())
            if self._stopping:
                return False
            if self._sequences:
                if not wait or self.scheduler.running or not (pause := self._pause()):
                    return True
            elif not wait or (self.refusal is not None and self._inbox.empty()):
                return False
            else:
                pause = None
            with suppress(Empty):
                self._accept(self._inbox.get(timeout=pause))

    def _pause(self) -> float:
        """Seconds until waiting sequences start, where none runs."""
        start = None if self.refusal is not None else self.scheduler.gathering_until()
        return 0.0 if start is None else max(start - self._clock(), 0.0)

    def step(self) -> list[Output]:
        """Schedule, run, commit. Called by the thread; by hand only where no thread was started."""
        start = self._clock()
        outputs = self._end_late(start)
        plan = self.scheduler.schedule(start, gather=self.refusal is None)
        if not plan.chunks:
            return outputs
        drafting = 0.0 if self._speculator is None else self._speculator.draft(self.scheduler, plan)
        load = plan.load()
        for source, target in plan.copies:
            self._engine.copy_block(source, target)
        before = self._clock()
        logits, hidden = self._run(plan.chunks)
        after = self._clock()
        committed, speculation = self._commit(plan.chunks, logits, hidden, drafting)
        outputs += committed
        seconds = self._clock() - start
        self._num_steps += 1
        self._num_computed += load.tokens
        if self.scheduler.pacer is not None:
            self.scheduler.pacer.model.update(load, (seconds - drafting) * 1000)
        if self._speculator is not None:
            self._speculator.note_times(load, seconds, after - before)
        self._tell(StepDone(seconds, after - before, load, speculation))
        return outputs

    def _run(self, chunks: Sequence[Chunk]) -> tuple[Floats, Floats | None]:
        """Logits, and the hidden states of all rows if a drafter or a sequence wants them."""
        step = build_step(chunks)
        drafts = self._speculator is not None and self._speculator.wants_hidden
        if not drafts and not is_pooled(chunks):
            return self._engine.run(step), None
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        result = self._engine.run_with_hidden(replace(step, hidden_rows=rows))
        return result.logits, result.hidden

    def _end_late(self, now: float) -> list[Output]:
        """Give up what is out of time."""
        outputs = []
        for sequence, error in self.scheduler.late(now):
            self._num_refused += isinstance(error, OverloadedError)
            self._forget(sequence)
            outputs.append(Output(sequence.id, None, error=error))
        return outputs

    def _tell(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)

    def _commit(
        self, chunks: Sequence[Chunk], logits: Floats, hidden: Floats | None, drafting: float
    ) -> tuple[list[Output], SpeculationDone | None]:
        """Append tokens where a sequence's end was reached, count what was computed, drop what ended."""
        rows = np.split(logits, np.cumsum([chunk.num_logits for chunk in chunks])[:-1])
        ends = [chunk.reaches_end for chunk in chunks]
        report_prompts(logits, chunks)
        extensions = [
            self._extend(chunk, own) if end and chunk.sequence.options.pooling is None else None
            for chunk, own, end in zip(chunks, rows, ends, strict=True)
        ]
        accepted = [[] if extension is None else extension.accepted for extension in extensions]
        self._gather_paths(chunks, accepted)
        outputs = [] if hidden is None else self._pool(chunks, hidden)
        self.scheduler.commit(chunks, list(map(len, accepted)))
        speculation = None
        if self._speculator is not None:
            speculation = self._speculator.learn(chunks, extensions, hidden, drafting)
        for output in outputs:
            self._forget(self._sequences[output.request_id])
        for chunk, extension in zip(chunks, extensions, strict=True):
            if extension is not None:
                outputs += self._report(chunk.sequence, extension)
        return outputs, speculation

    def _pool(self, chunks: Sequence[Chunk], hidden: Floats) -> list[Output]:
        """The embeddings that a step completed; `hidden` [T, width] is of all its rows."""
        rows = np.split(hidden, np.cumsum([chunk.num_rows for chunk in chunks])[:-1])
        outputs = []
        for chunk, own in zip(chunks, rows, strict=True):
            if chunk.sequence.options.pooling is None:
                continue
            embedding = self._pooler.add(chunk, own)
            if embedding is not None:
                outputs.append(Output(chunk.sequence.id, None, embedding=embedding))
        return outputs

    def _extend(self, chunk: Chunk, logits: Floats) -> Extension:
        speculator = self._speculator
        return extend(
            chunk.sequence,
            logits[-1 - len(chunk.draft) :],
            chunk.draft,
            block_verification=speculator is not None and speculator.block_verification,
        )

    def _gather_paths(self, chunks: Sequence[Chunk], accepted: Sequence[Sequence[int]]) -> None:
        """Move the keys and values of each accepted path of a tree together, behind the token before it."""
        sources, targets = [], []
        for chunk, path in zip(chunks, accepted, strict=True):
            start = chunk.sequence.num_computed + chunk.num_new
            moved = [(start + place, start + depth) for depth, place in enumerate(path) if place != depth]
            if moved:
                both = slots_of(
                    chunk.sequence.block_table, np.array(moved, np.int32), self._engine.block_size
                )
                sources.append(both[:, 0])
                targets.append(both[:, 1])
        if sources:
            self._engine.move_slots(np.concatenate(sources), np.concatenate(targets))

    def _report(self, sequence: SequenceState, extension: Extension) -> list[Output]:
        """The outputs of what was appended; drops the sequence if that ended it."""
        now = self._clock()
        if sequence.first_token is None and sequence.num_generated:
            sequence.first_token = now
        outputs = [self._output(sequence, chosen) for chosen in extension.chosen]
        for place in range(len(extension.accepted)):  # an answer that ends here has none of the later ones
            later = len(extension.accepted) - place - 1
            outputs[place] = replace(
                outputs[place],
                num_accepted_drafts=sequence.num_accepted - later,
                num_rejected_drafts=sequence.num_rejected + later,
            )
        last = extension.chosen[-1]
        self._num_generated += len(extension.chosen) - (last.token is None)
        reason = None if last.token is None else sequence.finish_reason()
        if reason is not None:
            outputs[-1] = replace(outputs[-1], finish_reason=reason)
            self._tell(SequenceDone.of(sequence, reason, now))
        if reason is not None or last.token is None:
            self._forget(sequence)
        return outputs

    def _output(self, sequence: SequenceState, chosen: NextToken) -> Output:
        if chosen.token is None:
            return Output(sequence.id, None, error=chosen.error)
        prompt_logprobs = None
        if sequence.num_generated == 1 and sequence.params.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        return Output(
            sequence.id,
            chosen.token,
            logprobs=chosen.logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=sequence.num_cached,
            num_accepted_drafts=sequence.num_accepted,
            num_rejected_drafts=sequence.num_rejected,
        )

    def _work(self) -> None:
        try:
            while self.receive():
                outputs = self.step()
                if outputs:
                    self._deliver(outputs)
        except Exception as error:
            _log.exception("the engine loop ends")
            self.failure = error
            failure = f"the engine failed: {type(error).__name__}: {error}"
            self._refuse(failure)
            self._fail_all(failure)
            self.on_failure()
        else:
            self._fail_all("the server was stopped before the answer was complete")

    def _accept(self, message: SequenceState | int | None) -> None:
        if isinstance(message, SequenceState):
            self._sequences[message.id] = message
            self.scheduler.add(message)
        elif message is not None and message in self._sequences:
            self._forget(self._sequences[message])

    def _forget(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        self._pooler.forget(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        del self._sequences[sequence.id]
        with self._lock:
            self._num_unfinished -= 1

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self.refusal = reason
        self._inbox.put(None)

    def _fail_all(self, error: str) -> None:
        """End every request that is left, those still in the inbox too; nothing can be submitted by now."""
        while not self._inbox.empty():
            self._accept(self._inbox.get())
        left = list(self._sequences.values())
        for sequence in left:
            self._forget(sequence)
        if left:
            self._deliver([Output(sequence.id, None, error=GenerationError(error)) for sequence in left])


def _do_nothing() -> None:
    pass


def build_step(chunks: Sequence[Chunk]) -> Step:
    """The ragged batch that computes these chunks and their drafts, with the logits that each wants."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for chunk in chunks:
        start, end = chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.num_new
        token_ids += chunk.sequence.tokens[start:end]
        positions += range(start, end)
        if chunk.draft:
            token_ids += chunk.draft.tokens
            positions += (end - 1 + chunk.draft.depths()).tolist()
        logit_rows += range(len(token_ids) - chunk.num_logits, len(token_ids))
    masks: list[Bools | None] = [_mask(chunk.draft) for chunk in chunks]
    return Step(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        past_lens=np.array([chunk.sequence.num_computed for chunk in chunks], np.int32),
        new_lens=np.array([chunk.num_rows for chunk in chunks], np.int32),
        block_tables=[chunk.sequence.block_table for chunk in chunks],
        logit_rows=np.array(logit_rows, np.int32),
        masks=None if all(mask is None for mask in masks) else masks,
    )


def _mask(draft: Draft) -> Bools | None:
    return None if draft.parents is None else draft.mask()
