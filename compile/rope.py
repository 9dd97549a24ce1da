"""Rotary position embedding: its parameters as config.json writes them, and the frequencies they mean."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qtool.compile.fields import Fields
from qtool.errors import QtoolError, nearest


@dataclass(frozen=True)
class Rope:
    """A rotary embedding (RoFormer, section 3.2.2) over the two halves of a head of `dim` features.

    `kind` says how the context was extended after pretraining; the fields below it belong to that kind.
    """

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0

    def frequencies(self) -> NDArray[np.float32]:
        """Radians a position, [dim / 2]."""
        plain = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        return _SCALINGS[self.kind](self, plain).astype(np.float32)


def read_rope(fields: Fields, dim: int) -> Rope:
    """The rotary embedding of a config: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``."""
    where = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    theta = fields.number("rope_theta", 10_000.0)
    values = fields.section(where)
    if fields.has("rope_scaling") and where != "rope_scaling":
        fields.refuse("rope_scaling", "rope_parameters alone")
    kind = values.text("rope_type", values.text("type", "default"))
    if kind not in _SCALINGS:
        raise QtoolError(f"{values.where}rope_type {kind!r} is not supported; {nearest(kind, _SCALINGS)}")
    rope = Rope(
        theta=values.number("rope_theta", theta),
        dim=dim,
        kind=kind,
        **{name: values.number(name) for name in _NUMBERS[kind]},
        original_context=values.integer("original_max_position_embeddings") if kind == "llama3" else 0,
    )
    if fields.has("rope_theta") and rope.theta != theta:
        fields.refuse("rope_theta", f"{rope.theta}, as {where} says")
    values.finish(())
    return rope


def _default(rope: Rope, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    return frequencies


def _linear(rope: Rope, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    return frequencies / rope.factor


def _llama3(rope: Rope, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / rope.factor)


_SCALINGS: dict[str, Callable[[Rope, NDArray[np.float64]], NDArray[np.float64]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
