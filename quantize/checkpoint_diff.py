"""Compare two checkpoints tensor by tensor."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qtool.core.checkpoint import Checkpoint
from qtool.core.manifest import MANIFEST, LinearRecord, read_manifest
from qtool.core.qtensor import Linear
from qtool.core.schemes import Fp8Scheme, IntScheme, LinearScheme
from qtool.errors import QtoolError, UsageError
from qtool.quantize.difference import Difference, Side

logger = logging.getLogger(__name__)


def diff_checkpoints(a: Path, b: Path) -> Iterator[Difference]:
    """Compare two checkpoint folders tensor by tensor; QtoolError for what is damaged.

    UsageError when a tensor has another shape in one than in the other.
    """
    sides = (_Opened(Checkpoint(a)), _Opened(Checkpoint(b)))
    for name in sorted({*sides[0].names, *sides[1].names}):
        one, other = (side.side(name) for side in sides)
        if one is None or other is None:
            yield Difference(name=name, a=one, b=other)
            continue
        mine, theirs = (side.read(name) for side in sides)
        x, y = mine.dense(), theirs.dense()
        if x.shape != y.shape:
            raise UsageError(f"{name}: has shape {tuple(x.shape)} in one and {tuple(y.shape)} in the other")
        same_format = _meaning(one, sides[0].schemes.get(name), mine) == _meaning(
            other, sides[1].schemes.get(name), theirs
        )
        apart, norm = (x - y).abs(), float(x.pow(2).mean().sqrt())
        yield Difference(
            name=name,
            a=one,
            b=other,
            same_format=same_format,
            same_codes=_same_codes(mine, theirs) if same_format else None,
            max_abs=float(apart.max()) if apart.numel() else 0.0,
            mean_abs=float(apart.mean()) if apart.numel() else 0.0,
            relative=float(apart.pow(2).mean().sqrt()) / norm if norm else None,
        )


def _records(path: Path) -> Mapping[str, LinearRecord]:
    """What a manifest says of each linear; a warning where another version of qtool wrote it."""
    if not path.is_file():
        return {}
    try:
        return read_manifest(path).linears
    except QtoolError as error:
        logger.warning("%s; its records are left out", error)
        return {}


class _Opened:
    """One checkpoint: its linears by module, its other tensors by their own names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.schemes = checkpoint, checkpoint.schemes()
        self._records = _records(checkpoint.path / MANIFEST)
        stored = [name for name in checkpoint if name.rpartition(".")[0] not in self.schemes]
        plain = [name for name in stored if not name.endswith(("k_scale", "v_scale"))]
        biases = [f"{module}.bias" for module in self.schemes if f"{module}.bias" in checkpoint]
        self.names = [*self.schemes, *(name.removesuffix(".weight") for name in [*plain, *biases])]

    def side(self, name: str) -> Side | None:
        if name not in self.names:
            return None
        if scheme := self.schemes.get(name):
            return Side(scheme=str(scheme), num_bits=scheme.weight.num_bits, record=self._records.get(name))
        tensor = self._tensor(name)
        return Side(scheme=str(tensor.dtype).removeprefix("torch."), num_bits=tensor.dtype.itemsize * 8)

    def read(self, name: str) -> Linear:
        return self._checkpoint.linear(name) if name in self.schemes else Linear(self._tensor(name), None)

    def _tensor(self, name: str) -> Tensor:
        stored = f"{name}.weight" if f"{name}.weight" in self._checkpoint else name
        return self._checkpoint.dense(stored)


def _meaning(side: Side, scheme: LinearScheme | None, linear: Linear) -> LinearScheme | str:
    """What a linear's scheme comes to, since formats spell it differently; the dtype of plain numbers.

    Zero points that are all zero are none, and what holds the whole channel is no group.
    """
    if scheme is None:
        return side.scheme
    weight, (rows, columns) = scheme.weight, linear.weight.shape
    if isinstance(weight, IntScheme):
        zero_points = getattr(linear.weight, "zero_point", None)
        weight = replace(
            weight,
            group_size=None if weight.group_size == columns else weight.group_size,
            symmetric=zero_points is None or not bool(zero_points.any()),
        )
    elif isinstance(weight, Fp8Scheme):
        weight = replace(
            weight,
            rows=None if weight.rows == rows else weight.rows,
            columns=None if weight.columns == columns else weight.columns,
        )
    activation = scheme.activation
    if activation is not None and activation.group_size == columns:
        activation = replace(activation, group_size=None)
    return LinearScheme(weight, activation)


def _same_codes(a: Linear, b: Linear) -> bool | None:
    if isinstance(a.weight, Tensor) or isinstance(b.weight, Tensor):
        return None
    orders = [torch.arange(one.weight.shape[1]) if one.order is None else one.order for one in (a, b)]
    return torch.equal(*orders) and all(
        _equal(getattr(a.weight, part, None), getattr(b.weight, part, None))
        for part in ("codes", "scale", "zero_point", "global_scale")
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:  # no zero points are zeros
        return not any(side is not None and bool(side.any()) for side in (a, b))
    return torch.equal(a.float(), b.float())
