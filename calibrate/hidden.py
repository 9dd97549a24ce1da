"""The hidden states of all calibration windows, on disk where memory is better spent on something else."""

import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qtool.errors import QtoolError


class HiddenStates(Protocol):
    """What comes to a layer for each of S windows, [L, hidden] in float32. A tensor [S, L, hidden] is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Tensor]: ...

    def __getitem__(self, window: int, /) -> Tensor: ...

    def __setitem__(self, window: int, state: Tensor, /) -> None: ...


class SpilledStates:
    """Hidden states in a file in `folder` that has no name, so that none is left when the run is killed.

    Written and read a window at a time instead of mapped: what was touched of a mapping counts as the
    process's memory, and a disk that is full would end the process instead of raising an OSError.
    """

    def __init__(self, folder: Path, count: int, shape: tuple[int, ...]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed, and so gone, with the states)
        self._count, self._shape = count, shape

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        return (self[window] for window in range(self._count))

    def __getitem__(self, window: int, /) -> Tensor:
        state = torch.empty(self._shape, device="cpu")
        if self._file.readinto(self._place(window, state)) != state.nbytes:
            raise QtoolError(f"{self._file.name}: hidden states cannot be read back; is the disk damaged?")
        return state

    def __setitem__(self, window: int, state: Tensor, /) -> None:
        self._file.write(self._place(window, state.to("cpu", torch.float32).contiguous()))
        self._file.flush()  # a full disk is to be told of here, and not when the file is closed

    def _place(self, window: int, state: Tensor) -> memoryview:
        """Go to where a window's state begins; the bytes of `state`."""
        self._file.seek(window * state.nbytes)
        return memoryview(state.numpy()).cast("B")


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
