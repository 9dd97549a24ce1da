"""Run two engines over the same windows and measure how far one drifts from the other."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from qtool.errors import QtoolError, UsageError
from qtool.eval.drift import ChunkDrift, Drift, chunk_drift, total_drift
from qtool.runtime.engines.contract import Engine, Step

CHUNK = 256
"""Positions whose logits are held at once: 256 x 152k x 4 bytes = 156 MB an engine."""


def compare(
    base: Engine, other: Engine, windows: Tensor, on_window: Callable[[], None] = lambda: None
) -> Drift:
    """Drift of `other` from `base` over `windows` [count, length] of token ids.

    `on_window` is called after each window. QtoolError where an engine gives logits that are not finite;
    UsageError where the two can't be compared.
    """
    if base.vocab_size != other.vocab_size:
        raise UsageError(
            f"the baseline has {base.vocab_size} tokens in its vocabulary and the other model "
            f"{other.vocab_size}; compare models with one tokenizer"
        )
    for name, engine in (("baseline", base), ("other model", other)):
        if windows.shape[1] > engine.max_context:
            raise UsageError(
                f"windows of {windows.shape[1]} tokens exceed the {name}'s context of {engine.max_context}; "
                "choose a smaller window length"
            )
    chunks: list[ChunkDrift] = []
    for window in windows:
        ids = window.numpy().astype(np.int32)
        start = 0
        for left, right in zip(window_logits(base, ids), window_logits(other, ids), strict=True):
            chunks.append(chunk_drift(left, right, window[start + 1 : start + 1 + len(left)]))
            start += len(left)
        on_window()
    return total_drift(chunks)


def window_logits(engine: Engine, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Iterator[Tensor]:
    """The logits [T, V] of one window, `CHUNK` positions at a time. QtoolError for one that is not finite."""
    table = list(range(-(-len(ids) // engine.block_size)))
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        step = Step(
            token_ids=chunk,
            positions=np.arange(start, start + len(chunk), dtype=np.int32),
            past_lens=np.array([start], np.int32),
            new_lens=np.array([len(chunk)], np.int32),
            block_tables=[table],
            logit_rows=np.arange(len(chunk), dtype=np.int32),
        )
        logits = torch.from_numpy(engine.run(step))
        if not bool(logits.isfinite().all()):
            raise QtoolError(f"the model gives logits that are not finite near position {start} of a window")
        yield logits
