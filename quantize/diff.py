"""Compare two checkpoints, or two manifests: what differs, linear by linear."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from qtool.core.checkpoint import Checkpoint
from qtool.core.manifest import MANIFEST, LinearRecord, Manifest
from qtool.core.qtensor import Linear
from qtool.errors import QtoolError, UsageError

logger = logging.getLogger(__name__)


class Side(BaseModel):
    """What one of the two makes of a linear, or of another tensor."""

    model_config = ConfigDict(frozen=True)

    scheme: str
    """Its number format, such as ``int4 symmetric, group 64``; for plain numbers the dtype."""
    num_bits: int
    record: LinearRecord | None = None
    """What its manifest says of it."""


class Difference(BaseModel):
    """One linear, or another tensor, in both. What could not be compared is null."""

    model_config = ConfigDict(frozen=True)

    name: str
    a: Side | None
    """Null: only the other has it."""
    b: Side | None
    same_codes: bool | None = None
    """Whether codes, scales and zero points are equal; null unless both are quantized to one scheme."""
    max_abs: float | None = None
    """The largest difference of a weight."""
    mean_abs: float | None = None
    relative: float | None = None
    """Root mean square of the difference, relative to that of a's weights."""

    @property
    def same(self) -> bool:
        """Whether nothing differs that was compared."""
        schemes = self.a is not None and self.b is not None and self.a.scheme == self.b.scheme
        return schemes and not self.max_abs and (self.max_abs is not None or _records_equal(self))


def _records_equal(one: Difference) -> bool:
    return one.a is not None and one.b is not None and one.a.record == one.b.record


def diff(a: Path, b: Path) -> Iterator[Difference]:
    """Compare two checkpoint folders tensor by tensor, or two manifest files linear by linear.

    Raises UsageError when one is a file and the other a folder, QtoolError for what is damaged.
    """
    if a.is_dir() and b.is_dir():
        return _checkpoints(Checkpoint(a), Checkpoint(b))
    if a.is_file() and b.is_file():
        return _manifests(_manifest(a).linears, _manifest(b).linears)
    raise UsageError(f"{a}, {b}: wanted two checkpoint folders, or two {MANIFEST} files")


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise QtoolError(f"{path}: is no manifest of this version of qtool ({error})") from error


def _records(path: Path) -> Mapping[str, LinearRecord]:
    """What a manifest says of each linear; a warning where another version of qtool wrote it."""
    try:
        return _manifest(path).linears
    except QtoolError as error:
        logger.warning("%s; its records are left out", str(error).partition(" (")[0])
        return {}


def _manifests(a: Mapping[str, LinearRecord], b: Mapping[str, LinearRecord]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        yield Difference(name=name, a=_recorded(a.get(name)), b=_recorded(b.get(name)))


def _recorded(record: LinearRecord | None) -> Side | None:
    if record is None:
        return None
    return Side(scheme=record.scheme, num_bits=record.num_bits, record=record)


def _checkpoints(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    sides = (_Opened(a), _Opened(b))
    for name in sorted({*sides[0].names, *sides[1].names}):
        one, other = (side.side(name) for side in sides)
        if one is None or other is None:
            yield Difference(name=name, a=one, b=other)
            continue
        mine, theirs = (side.read(name) for side in sides)
        x, y = mine.dense(), theirs.dense()
        if x.shape != y.shape:
            raise UsageError(f"{name}: has shape {tuple(x.shape)} in one and {tuple(y.shape)} in the other")
        apart, norm = (x - y).abs(), float(x.pow(2).mean().sqrt())
        yield Difference(
            name=name,
            a=one,
            b=other,
            same_codes=_same_codes(mine, theirs) if one.scheme == other.scheme else None,
            max_abs=float(apart.max()) if apart.numel() else 0.0,
            mean_abs=float(apart.mean()) if apart.numel() else 0.0,
            relative=float(apart.pow(2).mean().sqrt()) / norm if norm else None,
        )


class _Opened:
    """One checkpoint: its linears by module, its other tensors by their own names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._schemes = checkpoint, checkpoint.schemes()
        manifest = checkpoint.path / MANIFEST
        self._records = _records(manifest) if manifest.is_file() else {}
        stored = [name for name in checkpoint if name.rpartition(".")[0] not in self._schemes]
        plain = [name for name in stored if not name.endswith(("k_scale", "v_scale"))]
        biases = [f"{module}.bias" for module in self._schemes if f"{module}.bias" in checkpoint]
        self.names = [*self._schemes, *(name.removesuffix(".weight") for name in [*plain, *biases])]

    def side(self, name: str) -> Side | None:
        if name not in self.names:
            return None
        if scheme := self._schemes.get(name):
            return Side(scheme=str(scheme), num_bits=scheme.weight.num_bits, record=self._records.get(name))
        tensor = self._tensor(name)
        return Side(scheme=str(tensor.dtype).removeprefix("torch."), num_bits=tensor.dtype.itemsize * 8)

    def read(self, name: str) -> Linear:
        return self._checkpoint.linear(name) if name in self._schemes else Linear(self._tensor(name), None)

    def _tensor(self, name: str) -> Tensor:
        stored = f"{name}.weight" if f"{name}.weight" in self._checkpoint else name
        return self._checkpoint.dense(stored)


def _same_codes(a: Linear, b: Linear) -> bool | None:
    if isinstance(a.weight, Tensor) or isinstance(b.weight, Tensor):
        return None
    orders = [torch.arange(one.weight.shape[1]) if one.order is None else one.order for one in (a, b)]
    return torch.equal(*orders) and all(
        _equal(getattr(a.weight, part, None), getattr(b.weight, part, None))
        for part in ("codes", "scale", "zero_point", "global_scale")
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.float(), b.float())
