"""What formats need of a checkpoint: its config, and its stored tensors by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor


class Stored(Protocol):
    """Tensors found by name."""

    path: Path

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, in its stored dtype."""
        ...


class StoredModel(Stored, Protocol):
    """What a `Checkpoint` is to its format: all tensors, and what config.json says of them."""

    config: dict[str, Any]

    def __iter__(self) -> Iterator[str]: ...
