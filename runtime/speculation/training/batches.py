"""The order in which collected sequences are learned from: the same one however often a run is resumed."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from qtool.compile.hidden import FINAL, HiddenLayer, HiddenStates
from qtool.errors import UsageError
from qtool.runtime.speculation.training.features import read_shard
from qtool.runtime.speculation.training.network import Batch

_SHORTEST = 16
"""Tokens of a sequence that drafts can be learned from."""
_HELD_OUT = 12
"""One sequence in so many is never learned from: acceptance is measured there."""


@dataclass(frozen=True)
class Place:
    """Sequences of one file, which make a batch."""

    shard: Path
    rows: tuple[int, ...]


class Batches:
    """Batches of `size` sequences of like length, cut to the shortest of them."""

    def __init__(
        self, shards: Sequence[Path], given: HiddenStates, read: Sequence[HiddenLayer], size: int
    ) -> None:
        """`given` is what the files hold of a token, `read` what the head reads of it. Raises UsageError when
        nothing is left to learn from."""
        self._given, self._read = given, read
        self._learned: dict[Path, list[Place]] = {}
        self.held_out: list[Place] = []
        """Batches that are never learned from."""
        for number, shard in enumerate(shards):
            lengths = _lengths(shard)
            rows = sorted(
                (row for row, length in enumerate(lengths) if length >= _SHORTEST), key=lengths.__getitem__
            )
            held = [row for row in rows if (row + number) % _HELD_OUT == 0]
            self.held_out += _cut(shard, held, size)
            self._learned[shard] = _cut(shard, [row for row in rows if row not in held], size)
        self.num_batches = sum(map(len, self._learned.values()))
        """Of an epoch."""
        if not self.num_batches or not self.held_out:
            raise UsageError(f"the data makes fewer than {_HELD_OUT} sequences to learn from; give more text")
        self._open: tuple[Path, list[Batch]] | None = None

    def epoch(self, number: int) -> list[Place]:
        """The batches of an epoch, in its own order: file by file, so that each is read once."""
        order = random.Random(number)
        shards = list(self._learned)
        order.shuffle(shards)
        places = []
        for shard in shards:
            part = list(self._learned[shard])
            order.shuffle(part)
            places += part
        return places

    def load(self, places: Sequence[Place]) -> Iterator[Batch]:
        """The batches at `places`; a file is read anew only where it changes."""
        opened, examples = None, []
        for place in places:
            if place.shard != opened:
                opened, examples = place.shard, read_shard(place.shard)
            chosen = [examples[row] for row in place.rows]
            length = min(len(example.tokens) for example in chosen)
            hidden = torch.stack([example.hidden[:length] for example in chosen])
            yield Batch(
                torch.stack([example.tokens[:length] for example in chosen]),
                torch.cat([hidden[..., self._given.columns(layer)] for layer in self._read], dim=-1),
                hidden[..., self._given.columns(FINAL)],
                torch.stack([torch.arange(length) >= example.num_given for example in chosen]),
            )


def watched(batches: Iterable[Batch], done: Callable[[], None]) -> Iterator[Batch]:
    """The batches; `done` is called after each."""
    for batch in batches:
        yield batch
        done()


def _lengths(shard: Path) -> list[int]:
    with safe_open(shard, framework="pt") as file:
        lengths: list[int] = file.get_tensor("lengths").tolist()
    return lengths


def _cut(shard: Path, rows: Sequence[int], size: int) -> list[Place]:
    return [Place(shard, tuple(rows[start : start + size])) for start in range(0, len(rows), size)]
