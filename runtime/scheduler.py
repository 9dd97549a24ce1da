"""What the next step computes. Plain Python: no tensors, and no clock of its own."""

from bisect import insort
from dataclasses import dataclass

from qtool.errors import UsageError
from qtool.runtime.blocks import BlockManager
from qtool.runtime.request import ParameterError, SequenceState


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens that one step computes. A smaller number makes prompts wait longer, and answers stall less."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise UsageError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}: a step could not decode every running sequence; raise it or run fewer"
            )


@dataclass(frozen=True)
class Chunk:
    """The part of a sequence that a step computes: the `num_new` tokens after its computed ones."""

    sequence: SequenceState
    num_new: int

    @property
    def reaches_end(self) -> bool:
        """Whether its last token is the sequence's last, so that its logits give the next token."""
        return self.num_new == self.sequence.num_uncomputed


class Scheduler:
    """Continuous batching by one rule, with no phases of prefill and decode.

    A sequence has tokens, some of them computed. Each step hands out a budget of tokens: to running
    sequences first, then to waiting ones in order of arrival, to each what it lacks or what is left. So a
    prompt is cut into chunks that fit beside the others' decoding (Sarathi-Serve, Agrawal et al. 2024,
    section 4), and iterations, not requests, are what is scheduled (Orca, Yu et al. 2022, section 3).

    A sequence takes the blocks of all its tokens when it is admitted, so that a prompt never stops halfway
    for want of blocks. When a decoding sequence finds none, the last arrived gives up its own and waits to
    be recomputed (PagedAttention, Kwon et al. 2023, section 4.5). The running sequences are thus always the
    first arrived, and the first of all can take any block: every sequence ends.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, max_context: int) -> None:
        self.config = config
        self.blocks = blocks
        self.max_context = max_context
        self.running: list[SequenceState] = []
        """In order of arrival."""
        self.waiting: list[SequenceState] = []
        """In order of arrival, all after the running ones."""
        self.num_preemptions = 0

    @property
    def max_tokens_per_sequence(self) -> int:
        """Tokens, prompt and answer together, that a sequence can have when it is alone."""
        return min(self.max_context, self.blocks.num_blocks * self.blocks.block_size)

    def refuse_misfit(self, num_prompt: int, max_tokens: int) -> None:
        """Raise ParameterError for a request that could never be served. Reads constants only: any thread."""
        if num_prompt < 1:
            raise ParameterError("prompt", "is empty; send at least one token")
        total, limit = num_prompt + max_tokens, self.max_tokens_per_sequence
        if total > limit:
            cause = (
                f"the model's context is {limit} tokens"
                if limit == self.max_context
                else f"the KV cache holds {limit} tokens"
            )
            raise ParameterError(
                "max_tokens",
                f"the prompt's {num_prompt} tokens and {max_tokens} more make {total}, but {cause}; shorten "
                "the prompt or lower max_tokens",
            )

    def add(self, sequence: SequenceState) -> None:
        """Put a new sequence behind the waiting ones. Raises ParameterError when it can never fit."""
        self.refuse_misfit(sequence.num_prompt, sequence.params.max_tokens)
        insort(self.waiting, sequence, key=_arrival)

    def schedule(self) -> list[Chunk]:
        """The next step, in order of arrival; empty only when no sequence is left.

        Blocks are taken here; `num_computed` moves when the caller has run the step.
        """
        budget = self.config.max_num_batched_tokens
        preempted = False
        chunks: list[Chunk] = []
        while budget and len(chunks) < len(self.running):
            sequence = self.running[len(chunks)]
            if not self.blocks.grow(sequence.block_table, len(sequence.tokens)):
                self._preempt_last()  # perhaps this very sequence
                preempted = True
                continue
            num_new = min(sequence.num_uncomputed, budget)
            chunks.append(Chunk(sequence, num_new))
            budget -= num_new
        if preempted:
            # What was just given up would be taken back at once, and computed again for nothing.
            return chunks
        while budget and self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            if not self.blocks.grow(sequence.block_table, len(sequence.tokens)):
                break
            self.running.append(self.waiting.pop(0))
            num_new = min(sequence.num_uncomputed, budget)
            chunks.append(Chunk(sequence, num_new))
            budget -= num_new
        return chunks

    def remove(self, sequence: SequenceState) -> None:
        """Forget a sequence that ended, was cancelled or failed; its blocks are free again."""
        self.blocks.free(sequence.block_table)
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def _preempt_last(self) -> None:
        sequence = self.running.pop()
        self.blocks.free(sequence.block_table)
        sequence.num_computed = 0
        self.waiting.insert(0, sequence)
        self.num_preemptions += 1


def _arrival(sequence: SequenceState) -> int:
    return sequence.id
