"""An engine whose logits are a function of the whole prefix, read back through the block table.

A wrong block table, position, past length or stale block changes the prefix it sees, and so the tokens.
"""

import threading
import time
import zlib
from collections.abc import Sequence

import numpy as np

from qtool.runtime.engines.contract import Floats, Ints, Step

EMPTY = -1


class FakeEngine:
    """Keeps token ids where a model keeps keys and values."""

    takes_trees = False
    hidden_states = None

    def __init__(
        self, num_blocks: int = 16, block_size: int = 4, vocab_size: int = 320, max_context: int = 256
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.pool = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.num_steps = 0
        self.num_tokens = 0
        """Tokens that all steps computed."""
        self.fail_at: int | None = None
        """The step that raises, counted from 0."""
        self.seconds_a_step = 0.0
        self.gate = threading.Event()
        """Steps wait while it is clear."""
        self.gate.set()

    def run(self, step: Step) -> Floats:
        """Store the new tokens, and give logits seeded by each wanted row's prefix."""
        assert self.gate.wait(timeout=60)
        time.sleep(self.seconds_a_step)
        if self.num_steps == self.fail_at:
            raise RuntimeError("the fake engine was told to fail")
        self.num_steps += 1
        self.num_tokens += len(step.token_ids)
        assert step.new_lens.sum() == len(step.token_ids) == len(step.positions)
        assert (step.new_lens > 0).all()
        written: set[int] = set()
        prefixes: list[np.ndarray] = []
        start = 0
        assert step.masks is None or self.takes_trees
        rows_of = zip(step.past_lens, step.new_lens, step.block_tables, strict=True)
        for sequence, (past, new, table) in enumerate(rows_of):
            assert len(table) * self.block_size >= past + new
            mask = step.mask(sequence)
            assert mask.diagonal().all()
            assert not np.triu(mask, 1).any()
            assert step.positions[start : start + new].tolist() == (past + mask.sum(1) - 1).tolist()
            slots = np.asarray(table)
            rows = slots[np.arange(past, past + new) // self.block_size]
            assert written.isdisjoint(rows.tolist()), "two sequences write to one block"
            written |= set(rows.tolist())
            self.pool[rows, np.arange(past, past + new) % self.block_size] = step.token_ids[
                start : start + new
            ]
            whole = self.pool[slots].reshape(-1)[: past + new]
            prefixes += [np.concatenate([whole[:past], whole[past:][seen]]) for seen in mask]
            start += new
        return (
            np.stack([self.logits(prefixes[row]) for row in step.logit_rows])
            if len(step.logit_rows)
            else np.empty((0, self.vocab_size), np.float32)
        )

    def logits(self, prefix: np.ndarray) -> Floats:
        """Logits [V] that a prefix gives, the same in every process."""
        seed = zlib.crc32(np.asarray(prefix, np.int64).tobytes())
        return np.random.default_rng(seed).normal(0, 3, self.vocab_size).astype(np.float32)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's tokens."""
        self.pool[target] = self.pool[source]

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy tokens from slot to slot."""
        self.pool.reshape(-1)[targets] = self.pool.reshape(-1)[sources]


def greedy(engine: FakeEngine, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation, computed without any runtime."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(engine.logits(np.array(tokens)).argmax()))
    return tokens[len(prompt) :]


class ScriptedEngine(FakeEngine):
    """Answers every chat of the byte tokenizer with the same tokens, then ends its answer."""

    def __init__(self, answer: Sequence[int], begins: Sequence[int], end: int) -> None:
        """`begins` are the tokens that open an answer in a prompt; what follows them last is the answer."""
        super().__init__(num_blocks=256, max_context=1024)
        self._script = [*answer, end]
        self._begins = list(begins)

    def logits(self, prefix: np.ndarray) -> Floats:
        """All but certain logits [V] for the script's next token."""
        tokens, width = prefix.tolist(), len(self._begins)
        starts = (
            start for start in range(len(tokens), -1, -1) if tokens[start - width : start] == self._begins
        )
        place = min(len(tokens) - next(starts), len(self._script) - 1)
        logits = np.zeros(self.vocab_size, np.float32)
        logits[self._script[place]] = 50
        return logits
