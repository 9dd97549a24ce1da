"""Ragged steps as the calls that a plan's profiles allow. Plain numpy: no GPU and no torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qtool.compile.backends.tensorrt.info import EngineInfo, Kind, ProfileInfo
from qtool.errors import QtoolError
from qtool.runtime.engines.contract import Bools, Ints, Step
from qtool.runtime.engines.padded import PaddedBatch


@dataclass(frozen=True)
class Piece:
    """`count` of a sequence's new tokens, from its `start`-th on."""

    sequence: int
    start: int
    count: int
    num_blocks: int
    """Of its past."""


@dataclass(frozen=True)
class Call:
    """Pieces of a step that one call of a profile computes, after the pieces that come before them."""

    profile: int
    pieces: tuple[Piece, ...]


def plan_calls(step: Step, info: EngineInfo) -> Iterator[Call]:
    """Calls that compute every new token of a step once, in an order in which each finds its past.

    Single tokens go to the decode profile, a few at once to the verify profile, more to the prefill profile
    in chunks. Raises QtoolError when a past is longer than the plan allows, or a tree wider.
    """
    index = {profile.kind: place for place, profile in enumerate(info.profiles)}
    prefill = info.profiles[index["prefill"]]
    chunk = prefill.sizes["S"][2]
    groups: dict[int, list[Piece]] = {place: [] for place in range(len(info.profiles))}
    for sequence, count in enumerate(step.new_lens.tolist()):
        kind = _kind(count, info.profiles)
        masked = step.masks is not None and step.masks[sequence] is not None
        if kind == "prefill" and masked and count > chunk:
            raise QtoolError(
                f"a tree of {count} drafts is wider than the {chunk} tokens of the engine's largest call"
            )
        size = chunk if kind == "prefill" else count
        for start in range(0, count, size):
            past = int(step.past_lens[sequence]) + start
            piece = Piece(sequence, start, min(count - start, size), -(-past // info.pool.block_size))
            _check_past(piece, prefill)
            if kind == "prefill":
                yield Call(index[kind], (piece,))
            else:
                groups[index[kind]].append(piece)
    for place, pieces in groups.items():
        yield from _batches(place, pieces, info)


def _kind(count: int, profiles: Sequence[ProfileInfo]) -> Kind:
    for profile in profiles:
        low, _, high = profile.sizes["S"]
        if profile.kind != "prefill" and low <= count <= high:
            return profile.kind
    return "prefill"


def _check_past(piece: Piece, profile: ProfileInfo) -> None:
    most = profile.sizes["M"][2]
    if piece.num_blocks > most:
        raise QtoolError(
            f"a sequence has {piece.num_blocks} blocks of past, the engine was built for {most}; compile it "
            "with a larger max_context"
        )


def _batches(place: int, pieces: Iterable[Piece], info: EngineInfo) -> Iterator[Call]:
    """Pieces of like past together, as many as the profile takes.

    A shorter past is padded to the longest of its call, and padding is gathered like the rest: read, written
    and read again. When that would cost more than reading the weights once more, a new call begins.
    """
    most = info.profiles[place].sizes["B"][2]
    pool = info.pool
    element = 2 if pool.dtype == "Half" else 4
    block_bytes = 2 * pool.num_layers * pool.num_kv_heads * pool.block_size * pool.head_dim * element
    batch: list[Piece] = []
    padding = 0
    for piece in sorted(pieces, key=lambda piece: -piece.num_blocks):
        padding += 3 * block_bytes * (batch[0].num_blocks - piece.num_blocks) if batch else 0
        if batch and (len(batch) == most or padding > info.weight_bytes):
            yield Call(place, tuple(batch))
            batch, padding = [], 0
        batch.append(piece)
    if batch:
        yield Call(place, tuple(batch))


def step_of(step: Step, pieces: Sequence[Piece]) -> tuple[Step, Ints, Ints]:
    """The part of a step that `pieces` are, and where the logits, then the hidden states, of its rows belong
    among the step's."""
    starts = np.cumsum(step.new_lens) - step.new_lens
    rows = [starts[piece.sequence] + piece.start + np.arange(piece.count, dtype=np.int32) for piece in pieces]
    tokens = np.concatenate(rows).astype(np.int32)
    wanted = np.flatnonzero(np.isin(tokens, step.logit_rows)).astype(np.int32)
    hidden_rows = np.empty(0, np.int32) if step.hidden_rows is None else step.hidden_rows
    hidden = np.flatnonzero(np.isin(tokens, hidden_rows)).astype(np.int32)
    part = Step(
        token_ids=step.token_ids[tokens],
        positions=step.positions[tokens],
        past_lens=np.array([step.past_lens[piece.sequence] + piece.start for piece in pieces], np.int32),
        new_lens=np.array([piece.count for piece in pieces], np.int32),
        block_tables=[step.block_tables[piece.sequence] for piece in pieces],
        logit_rows=wanted,
        masks=None if step.masks is None else [_mask(step, piece) for piece in pieces],
        hidden_rows=hidden,
    )
    logit_places = np.searchsorted(step.logit_rows, tokens[wanted]).astype(np.int32)
    return part, logit_places, np.searchsorted(hidden_rows, tokens[hidden]).astype(np.int32)


def _mask(step: Step, piece: Piece) -> Bools | None:
    mask = None if step.masks is None else step.masks[piece.sequence]
    return None if mask is None or piece.count < len(mask) else mask


def grow(batch: PaddedBatch, num_sequences: int, num_blocks: int, block_size: int) -> PaddedBatch:
    """The batch padded on to B = `num_sequences` and M = `num_blocks`."""
    sequences, tokens = batch.token_ids.shape
    rows, blocks = num_sequences - sequences, num_blocks - batch.block_tables.shape[1]
    return replace(
        batch,
        token_ids=np.pad(batch.token_ids, ((0, rows), (0, 0))),
        positions=np.pad(batch.positions, ((0, rows), (0, 0))),
        block_tables=np.pad(batch.block_tables, ((0, rows), (0, blocks))),
        masks={
            window: _grow_mask(mask, tokens, rows, blocks * block_size)
            for window, mask in batch.masks.items()
        },
    )


def _grow_mask(mask: Bools, tokens: int, rows: int, slots: int) -> Bools:
    """`mask` [B, 1, S, P + S] over more past, which nobody sees, and more rows, which see themselves."""
    sequences, past = len(mask), mask.shape[3] - tokens
    grown = np.zeros((sequences + rows, 1, tokens, past + slots + tokens), np.bool_)
    grown[:sequences, :, :, :past] = mask[..., :past]
    grown[:sequences, :, :, past + slots :] = mask[..., past:]
    grown[sequences:, :, :, past + slots :] = np.eye(tokens, dtype=np.bool_)
    return grown


def round_up(size: int, most: int) -> int:
    """The next power of two, `most` at most: so that there are few shapes to keep a CUDA graph for."""
    return min(1 << (size - 1).bit_length(), most)
