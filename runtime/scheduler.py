"""What the next step computes. Plain Python: no tensors, and no clock of its own."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qtool.errors import UsageError
from qtool.runtime.blocks import BlockManager
from qtool.runtime.failures import DeadlineExceededError, GenerationError, OverloadedError
from qtool.runtime.request import ParameterError, SamplingParams, SequenceState
from qtool.runtime.slo import Pacer, Slo
from qtool.runtime.speculation.contract import EMPTY, Draft
from qtool.runtime.steptime import StepLoad

_PROMPT_LOGITS_A_STEP = 256
"""Rows of logits of prompts' tokens: with a vocabulary of 150,000 they take 150 MB."""
_NOTHING = StepLoad()
_MAX_PROMPT_LOGPROBS = 200_000
"""What a request may make a response report: some 15 MB of JSON."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens that one step computes. A smaller number makes prompts wait longer, and answers stall less."""
    prefix_caching: bool = True
    """Whether prompts that begin as an earlier one did take over its blocks."""
    max_queue: int = 1024
    """Sequences that may wait beside those that run; more are refused, so that none waits without end."""
    batch_wait_ms: float = 0.0
    """How long a sequence waits for others to start with. More makes batches fuller and answers later."""
    slo: Slo | None = None
    """What requests are promised; sizes chunks and the batch below the limits above."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise UsageError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step could not decode every running sequence; raise it or run fewer"
            )
        if self.max_queue < 0:
            raise UsageError(f"max_queue must be at least 0, got {self.max_queue}")
        if not 0 <= self.batch_wait_ms < float("inf"):
            raise UsageError(f"batch_wait_ms must be finite and at least 0, got {self.batch_wait_ms}")


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence that a step computes: the `num_new` tokens after its computed ones, and drafts
    that may follow them."""

    sequence: SequenceState
    num_new: int
    draft: Draft = EMPTY
    """Only where the chunk is the last token of a sequence that decodes."""

    @property
    def reaches_end(self) -> bool:
        """Whether its last token is the sequence's last, so that its logits give the next token."""
        return self.num_new == self.sequence.num_uncomputed

    @property
    def decodes(self) -> bool:
        """Whether it is the one token that the sequence's answer got last."""
        return self.num_new == 1 and self.reaches_end and self.sequence.num_generated > 0

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes, drafts included."""
        return self.num_new + len(self.draft)

    @property
    def num_logits(self) -> int:
        """Rows, the last of the chunk, whose logits are wanted: one at the end and one for each draft, or all
        for prompt logprobs."""
        if self.sequence.options.pooling is not None:
            return 0
        if self.sequence.wants_prompt_logits:
            return self.num_new
        return int(self.reaches_end) + len(self.draft)


@dataclass(frozen=True)
class Plan:
    """One step: first copy blocks, one after the other, then compute the chunks."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]]
    """Source and target blocks. A source may be free already, so nothing may be written before."""
    preempted: list[SequenceState] = field(default_factory=list)
    """Sequences that gave up their blocks."""

    def load(self) -> StepLoad:
        """What the step computes, before it is committed."""
        return _load(self.chunks)

    def decoding_load(self) -> StepLoad:
        """Of that, what sequences that decode do."""
        return _load([chunk for chunk in self.chunks if chunk.decodes])


def _load(chunks: Sequence[Chunk]) -> StepLoad:
    load = StepLoad()
    for chunk in chunks:
        load = load.plus(chunk.sequence.num_computed, chunk.num_rows)
    return load


@dataclass(frozen=True)
class _Prefix:
    """Blocks whose first `num_tokens` tokens are a sequence's own."""

    blocks: Sequence[int]
    num_tokens: int
    cached: bool = False
    """Whether the cache was asked for them."""


@dataclass
class _Budget:
    """What a step may still compute."""

    tokens: int
    pacer: Pacer | None
    load: StepLoad = _NOTHING
    """Of sequences that decode, planned or still to be planned, and of planned chunks."""
    decodes: bool = False
    prompt_logits: int = _PROMPT_LOGITS_A_STEP

    @property
    def paced_load(self) -> StepLoad:
        """What a step's time is counted from: nothing while no sequence decodes, which alone is paced."""
        return self.load if self.decodes else _NOTHING

    def reserve(self, running: Sequence[SequenceState]) -> None:
        """Count the sequences that decode, before what else fits is known."""
        for sequence in running:
            if sequence.num_uncomputed == 1:
                self.load = self.load.plus(sequence.num_computed, 1)
                self.decodes = True

    def give(self, plan: Plan, sequence: SequenceState, reserved: int = 0) -> None:
        """Plan as much of a sequence as the budget allows, `reserved` tokens left for others."""
        num_new = min(sequence.num_uncomputed, self.tokens - reserved)
        if sequence.wants_prompt_logits:
            num_new = min(num_new, self.prompt_logits)
            self.prompt_logits -= num_new
        if sequence.num_uncomputed > 1 and self.pacer is not None:
            if self.decodes:
                num_new = self.pacer.chunk_limit(self.load, sequence.num_computed, num_new)
            self.load = self.load.plus(sequence.num_computed, num_new)
        if num_new:
            plan.chunks.append(Chunk(sequence, num_new))
            self.tokens -= num_new


class Scheduler:
    """Continuous batching by one rule, with no phases of prefill and decode.

    A sequence has tokens, some of them computed. Each step hands out a budget of tokens: to running
    sequences first, then to waiting ones by rank, to each what it lacks or what is left. So a prompt is cut
    into chunks that fit beside the others' decoding (Sarathi-Serve, Agrawal et al. 2024, section 4), and
    iterations, not requests, are what is scheduled (Orca, Yu et al. 2022, section 3). Rank is priority, the
    lower first, then arrival.

    A sequence takes the blocks of all its tokens when it is admitted, so that a prompt never stops halfway
    for want of blocks. When a decoding sequence finds none, the running one of last rank gives up its own
    and waits to be recomputed (PagedAttention, Kwon et al. 2023, section 4.5). The running sequence of first
    rank can thus take any block and ends, and so does every other in its turn.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, max_context: int) -> None:
        self.config = config
        self.blocks = blocks
        self.max_context = max_context
        self.running: list[SequenceState] = []
        """By rank."""
        self.waiting: list[SequenceState] = []
        """By rank."""
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        """Prompt tokens that the prefix cache held, of `num_queried_tokens` in all."""
        self.num_queried_tokens = 0
        self._timed: dict[int, SequenceState] = {}
        """Those with a deadline."""
        self.pacer: Pacer | None = None
        """Keeps the objectives; None while there is none, or no step time is known."""

    @property
    def max_tokens_per_sequence(self) -> int:
        """Tokens, prompt and answer together, that a sequence can have when it is alone."""
        return min(self.max_context, self.blocks.num_blocks * self.blocks.block_size)

    def refuse_misfit(self, num_prompt: int, params: SamplingParams, num_answer: int | None = None) -> None:
        """Raise ParameterError for a request that could never be served. Reads constants only: any thread.

        `num_answer` is how many tokens follow the prompt at most, `max_tokens` if it is not given.
        """
        limit = self.max_tokens_per_sequence
        holder = "the model's context is" if limit == self.max_context else "the KV cache holds"
        num_answer = params.max_tokens if num_answer is None else num_answer
        refuse_longer(num_prompt, num_answer, limit, holder)
        if params.prompt_logprobs is not None:
            num_entries = num_prompt * (1 + params.prompt_logprobs)
            if num_entries > _MAX_PROMPT_LOGPROBS:
                raise ParameterError(
                    "prompt_logprobs",
                    f"{num_prompt} tokens with {params.prompt_logprobs} likeliest each make {num_entries} "
                    f"log-probabilities, and at most {_MAX_PROMPT_LOGPROBS} are reported; shorten the prompt",
                )

    def add(self, sequence: SequenceState) -> None:
        """Let a new sequence wait for its turn. Raises ParameterError when it can never fit."""
        num_answer = 0 if sequence.options.pooling is not None else sequence.params.max_tokens
        self.refuse_misfit(sequence.num_prompt, sequence.params, num_answer)
        insort(self.waiting, sequence, key=_rank)
        if sequence.deadline is not None:
            self._timed[sequence.id] = sequence

    def refuse_overload(self, num_unfinished: int, prompts: Sequence[int], n: int) -> None:
        """Raise OverloadedError when `n` answers to prompts of these lengths can't be taken on now.

        `num_unfinished` sequences are in the house. Reads what the loop's thread writes, from any thread: an
        estimate may be a step old.
        """
        count, limit = len(prompts) * n, self.config.max_num_seqs + self.config.max_queue
        if count > limit:
            raise ParameterError("n", f"asks for {count} answers at once, and the server takes {limit}")
        if num_unfinished + count > limit:
            raise OverloadedError(
                f"the queue is full: {num_unfinished} answers are under way, and the server takes {limit}; "
                "try again soon",
                retry_after_s=1,
            )
        pacer = self.pacer
        if pacer is None or pacer.slo.ttft_ms is None or pacer.slo.policy != "reject":
            return
        expected_ms = pacer.expected_ttft_ms(
            sum(prompts),
            list(self.running),
            list(self.waiting),
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
        )
        if expected_ms > pacer.slo.ttft_ms:
            raise OverloadedError(
                f"the first token would take {expected_ms:.0f} ms, and {pacer.slo.ttft_ms:.0f} ms are "
                "promised; try again later",
                retry_after_s=(expected_ms - pacer.slo.ttft_ms) / 1000,
            )

    def late(self, now: float) -> list[tuple[SequenceState, GenerationError | OverloadedError]]:
        """Sequences that are out of time, and why: their own limit passed, or the promised TTFT did before
        they were started and the policy is to refuse."""
        found: list[tuple[SequenceState, GenerationError | OverloadedError]] = []
        for sequence in self._timed.values():
            if sequence.deadline is not None and now >= sequence.deadline:
                limit = f"{sequence.options.timeout_s} s, the request's own limit"
                found.append((sequence, DeadlineExceededError(f"the answer is not complete after {limit}")))
        slo = self.config.slo
        if slo is None or slo.policy != "reject" or slo.ttft_ms is None:
            return found
        for sequence in self.waiting:
            if not sequence.was_admitted and now >= sequence.arrived + slo.ttft_ms / 1000:
                limit = f"within the promised {slo.ttft_ms:.0f} ms"
                error = OverloadedError(f"the request could not be started {limit}; try again later", 1)
                found.append((sequence, error))
        return found

    def gathering_until(self) -> float | None:
        """When waiting sequences start at the latest, None when they may at once.

        They wait for company, for `batch_wait_ms` after the first one's arrival, while places are free.
        """
        places = self.config.max_num_seqs - len(self.running)
        if not self.config.batch_wait_ms or not 0 < len(self.waiting) < places:
            return None
        if any(sequence.was_admitted for sequence in self.waiting):
            return None
        return min(sequence.arrived for sequence in self.waiting) + self.config.batch_wait_ms / 1000

    def schedule(self, now: float = 0.0, *, gather: bool = True) -> Plan:
        """The next step; without chunks when no sequence is left, or while all gather.

        Blocks are taken here; the caller runs the step and then calls `commit`.
        """
        plan = Plan([], [])
        budget = _Budget(self.config.max_num_batched_tokens, self.pacer)
        budget.reserve(self.running if self.pacer is not None else ())
        place = 0
        while budget.tokens and place < len(self.running):
            sequence = self.running[place]
            if not self.blocks.grow(sequence.block_table, len(sequence.tokens)):
                plan.preempted.append(self._preempt_last())  # perhaps this very sequence
                continue
            place += 1
            reserved = 0
            if sequence.num_uncomputed > 1:  # a long prompt leaves every sequence that decodes its token
                reserved = sum(other.num_uncomputed == 1 for other in self.running[place:])
            budget.give(plan, sequence, reserved)
        # What was just given up would be taken back at once, and computed again for nothing.
        start = self.gathering_until() if gather else None
        if not plan.preempted and (start is None or now >= start):
            self._admit(plan, budget, now)
        return plan

    def room_for_drafts(self, plan: Plan) -> list[tuple[int, int]]:
        """Places of the plan's chunks that may be given a draft, and how many tokens it may have: no more
        than the sequence may still get, than it has positions for, or than the step has left."""
        left = self.config.max_num_batched_tokens - sum(chunk.num_rows for chunk in plan.chunks)
        limit = self.max_tokens_per_sequence
        rooms = []
        for place, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            if chunk.decodes:
                missing = sequence.params.max_tokens - sequence.num_generated
                room = min(left, missing - 1, limit - len(sequence.tokens))
                if room > 0:
                    rooms.append((place, room))
        return rooms

    def add_draft(self, plan: Plan, place: int, draft: Draft) -> bool:
        """Let a step verify a draft; False, and nothing changed, when budget or blocks lack: no sequence
        gives up its own for drafts."""
        chunk = plan.chunks[place]
        rows = sum(chunk.num_rows for chunk in plan.chunks) + len(draft)
        if rows > self.config.max_num_batched_tokens:
            return False
        sequence = chunk.sequence
        if not self.blocks.grow(sequence.block_table, len(sequence.tokens) + len(draft)):
            return False
        plan.chunks[place] = replace(chunk, draft=draft)
        return True

    def commit(self, chunks: Sequence[Chunk], num_accepted: Sequence[int] = ()) -> None:
        """Count what a step computed, and offer the blocks that it filled to later prefixes.

        Of a chunk with a draft, `num_accepted` says how many of its tokens are the sequence's now, for each
        chunk; they lie behind the chunk's own. Blocks that only held rejected ones are free again.
        """
        for chunk, accepted in zip(chunks, num_accepted or [0] * len(chunks), strict=True):
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_new + accepted
            if chunk.draft:
                self.blocks.shrink(sequence.block_table, len(sequence.tokens))
            num_full = sequence.num_computed // self.blocks.block_size
            if self.config.prefix_caching and num_full > sequence.num_published:
                self.blocks.publish(
                    sequence.block_table,
                    sequence.tokens,
                    sequence.block_keys,
                    sequence.options.cache_salt,
                    range(sequence.num_published, num_full),
                )
                sequence.num_published = num_full

    def remove(self, sequence: SequenceState) -> None:
        """Forget a sequence that ended, was cancelled or failed; its blocks are free again."""
        self.blocks.free(sequence.block_table)
        self._timed.pop(sequence.id, None)
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if self.pacer is not None and sequence.num_generated:
            self.pacer.ended(sequence)

    def _admit(self, plan: Plan, budget: _Budget, now: float) -> None:
        """Start waiting sequences while budget, places and blocks last."""
        place = 0
        while budget.tokens and place < len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[place]
            if self._sibling_computes_prompt(sequence):
                place += 1
                continue
            if self.pacer is not None and not self.pacer.admits(self.running, sequence, budget.paced_load):
                break
            prefix = self._computed_prefix(sequence)
            if not self._take_blocks(sequence, prefix, plan):
                break
            self.running.append(self.waiting.pop(place))
            if sequence.started is None:
                sequence.started = now
                if prefix.cached:
                    sequence.num_cached = prefix.num_tokens
                    self.num_hit_tokens += prefix.num_tokens
                    self.num_queried_tokens += sequence.num_prompt
            budget.give(plan, sequence)
        self.running.sort(key=_rank)

    def _sibling_computes_prompt(self, sequence: SequenceState) -> bool:
        sibling = sequence.sibling
        return sibling in self.running and sibling.num_computed < sibling.num_prompt

    def _computed_prefix(self, sequence: SequenceState) -> _Prefix:
        """The longest beginning that need not be computed: not the last token, whose logits are wanted."""
        limit = len(sequence.tokens) - 1
        sibling = sequence.sibling
        if sibling in self.running:
            return _Prefix(sibling.block_table, min(sibling.num_prompt, limit))
        if sequence.wants_prompt_logits or sequence.options.pooling == "mean":
            return _Prefix([], 0)
        found: list[int] = []
        if self.config.prefix_caching:
            found = self.blocks.find_prefix(sequence.tokens, sequence.block_keys, sequence.options.cache_salt)
        num_hit = min(len(found) * self.blocks.block_size, limit)
        return _Prefix(found, num_hit, cached=True)

    def _take_blocks(self, sequence: SequenceState, prefix: _Prefix, plan: Plan) -> bool:
        """Give a sequence its blocks, whole ones of the prefix shared; False when blocks lack."""
        num_shared, partial = divmod(prefix.num_tokens, self.blocks.block_size)
        if not self.blocks.grow(sequence.block_table, len(sequence.tokens), prefix.blocks[:num_shared]):
            return False
        if partial:  # the sequence writes the rest of this block: into a copy (copy on write)
            plan.copies.append((prefix.blocks[num_shared], sequence.block_table[num_shared]))
        sequence.num_computed = prefix.num_tokens
        sequence.num_published = num_shared
        return True

    def _preempt_last(self) -> SequenceState:
        sequence = self.running.pop()
        self.blocks.free(sequence.block_table)
        sequence.num_computed = sequence.num_published = 0
        insort(self.waiting, sequence, key=_rank)
        self.num_preemptions += 1
        return sequence


def refuse_longer(num_prompt: int, max_tokens: int, limit: int, holder: str) -> None:
    """Raise ParameterError for an empty prompt, or one whose answer could get past `limit` tokens; `holder`
    says what has that limit, as in "the model's context is"."""
    if num_prompt < 1:
        raise ParameterError("prompt", "is empty; send at least one token")
    total = num_prompt + max_tokens
    if total > limit:
        raise ParameterError(
            "max_tokens",
            f"the prompt's {num_prompt} tokens and {max_tokens} more make {total}, but {holder} {limit} "
            "tokens; shorten the prompt or lower max_tokens",
        )


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.options.priority, sequence.id
