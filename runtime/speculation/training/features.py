"""The target's hidden states over sequences, kept on disk: computed once, read every epoch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.compile.hidden import FINAL
from qtool.core.kept import has_kept, keep
from qtool.errors import QtoolError
from qtool.runtime.engines.contract import Engine, Floats, Step
from qtool.runtime.speculation.training.corpus import CorpusOptions, Seed, complete

SEQUENCES_A_SHARD = 32
_TOKENS_A_STEP = 512


@dataclass(frozen=True)
class Example:
    """One sequence and what the target made of it."""

    tokens: Tensor
    """[T] int64"""
    hidden: Tensor
    """[T, width] float32: the hidden layers of the engine, side by side."""
    num_given: int
    """Leading tokens that are a prompt, which is never drafted; 0 of running text."""


def collect(
    engine: Engine,
    seeds: Sequence[Seed],
    options: CorpusOptions,
    stop: frozenset[int],
    folder: Path,
    advance: Callable[[], None],
) -> list[Path]:
    """Complete the seeds and write their hidden states, a file for every `SEQUENCES_A_SHARD` of them.

    A file that is there and whole is taken as it is, so that a collection that was killed goes on. `advance`
    is called after each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for start in range(0, len(seeds), SEQUENCES_A_SHARD):
        shard = folder / f"part-{start // SEQUENCES_A_SHARD:05}.safetensors"
        if not has_kept(shard):
            part = seeds[start : start + SEQUENCES_A_SHARD]
            given = [len(seed.tokens) if seed.own else 0 for seed in part]
            _write(engine, list(complete(engine, part, options, stop, start)), given, shard)
        shards.append(shard)
        advance()
    return shards


def _write(engine: Engine, sequences: Sequence[Sequence[int]], given: Sequence[int], shard: Path) -> None:
    hidden = torch.from_numpy(np.concatenate([hidden_of(engine, tokens) for tokens in sequences]))
    rounded = hidden.half()
    if not bool(rounded.isfinite().all()):
        raise QtoolError(
            f"hidden states reach {hidden.abs().max().item():g}, more than float16 can hold; "
            "the target's weights are damaged, or it was made for bfloat16 alone"
        )
    tensors = {
        "tokens": torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int32),
        "given": torch.tensor(given, dtype=torch.int32),
        "hidden": rounded,
    }
    temporary = shard.with_suffix(".partial")
    save_file(tensors, temporary)
    keep(temporary, shard)


def hidden_of(engine: Engine, tokens: Sequence[int]) -> Floats:
    """The hidden states [T, width] of one sequence; the engine's pool is overwritten from its start."""
    blocks = list(range(-(-len(tokens) // engine.block_size)))
    parts = []
    for start in range(0, len(tokens), _TOKENS_A_STEP):
        new = len(tokens[start : start + _TOKENS_A_STEP])
        step = Step(
            token_ids=np.array(tokens[start : start + new], np.int32),
            positions=np.arange(start, start + new, dtype=np.int32),
            past_lens=np.array([start], np.int32),
            new_lens=np.array([new], np.int32),
            block_tables=[blocks],
            logit_rows=np.empty(0, np.int32),
            hidden_rows=np.arange(new, dtype=np.int32),
        )
        parts.append(engine.run_with_hidden(step).hidden)
    return np.concatenate(parts)


def hidden_alone(engine: Engine, prefix: Sequence[int], file: Path) -> Tensor:
    """The final hidden state [V, hidden] of every token with no text of its own before it, only a block of
    `prefix`, repeated. Kept in `file`, and taken from there if that is whole."""
    if has_kept(file):
        kept: Tensor = load_file(file)["hidden"]
        return kept
    assert engine.hidden_states is not None, "the caller has looked"
    columns = engine.hidden_states.columns(FINAL)
    size = engine.block_size
    hidden_of(engine, (list(prefix) * size)[:size])
    count = min(_TOKENS_A_STEP, engine.num_blocks - 1)
    parts = []
    for start in range(0, engine.vocab_size, count):
        new = min(count, engine.vocab_size - start)
        step = Step(
            token_ids=np.arange(start, start + new, dtype=np.int32),
            positions=np.full(new, size, np.int32),
            past_lens=np.full(new, size, np.int32),
            new_lens=np.ones(new, np.int32),
            block_tables=[[0, 1 + place] for place in range(new)],
            logit_rows=np.empty(0, np.int32),
            hidden_rows=np.arange(new, dtype=np.int32),
        )
        parts.append(torch.from_numpy(engine.run_with_hidden(step).hidden[:, columns]))
    hidden = torch.cat(parts).float()
    temporary = file.with_suffix(".partial")
    save_file({"hidden": hidden}, temporary)
    keep(temporary, file)
    return hidden


def read_shard(shard: Path) -> list[Example]:
    """The sequences of one file."""
    tensors = load_file(shard)
    lengths = tensors["lengths"].tolist()
    tokens = tensors["tokens"].long().split(lengths)
    hidden = tensors["hidden"].float().split(lengths)
    return [Example(*parts) for parts in zip(tokens, hidden, tensors["given"].tolist(), strict=True)]
