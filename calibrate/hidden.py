"""The hidden states of all calibration windows, on disk where memory is better spent on something else."""

import errno
import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class HiddenStates(Protocol):
    """What comes to a layer for each of S windows, [L, hidden] in float32. A tensor [S, L, hidden] is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Tensor]: ...

    def __getitem__(self, window: int, /) -> Tensor: ...

    def __setitem__(self, window: int, state: Tensor, /) -> None: ...


class SpilledStates:
    """Hidden states in a file in `folder` that has no name, so that none is left when the run is killed.

    Written and read a window at a time instead of mapped: what was touched of a mapping counts as the
    process's memory, and a disk that is full would end the process. Raises OSError, before any work, for a
    disk that has no room for all of them.
    """

    def __init__(self, folder: Path, count: int, shape: tuple[int, ...]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed with the states)
        weakref.finalize(self, self._file.close)
        self._count, self._shape = count, shape
        os.posix_fallocate(self._file.fileno(), 0, count * math.prod(shape) * torch.float32.itemsize)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        return (self[window] for window in range(self._count))

    def __getitem__(self, window: int, /) -> Tensor:
        state = torch.empty(self._shape, device="cpu")
        count = os.preadv(self._file.fileno(), [self._bytes(state)], window * state.nbytes)
        if count != state.nbytes:
            raise OSError(errno.EIO, f"read {count} of {state.nbytes} bytes of hidden states")
        return state

    def __setitem__(self, window: int, state: Tensor, /) -> None:
        state = state.to("cpu", torch.float32).contiguous()
        count = os.pwrite(self._file.fileno(), self._bytes(state), window * state.nbytes)
        if count != state.nbytes:
            raise OSError(errno.EIO, f"wrote {count} of {state.nbytes} bytes of hidden states")

    @staticmethod
    def _bytes(state: Tensor) -> memoryview:
        return state.numpy().data.cast("B")


def hold(states: Iterable[Tensor], count: int, folder: Path | None) -> HiddenStates:
    """Take up the states [L, hidden] of `count` windows as they come: in memory, or in a file in `folder`."""
    coming = iter(states)
    first = next(coming)
    held: HiddenStates = (
        torch.empty((count, *first.shape), device="cpu")
        if folder is None
        else SpilledStates(folder, count, tuple(first.shape))
    )
    for window, state in enumerate(chain([first], coming)):
        held[window] = state
    return held
