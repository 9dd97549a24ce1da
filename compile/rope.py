"""Rotary position embedding: its parameters as config.json writes them, and the frequencies they mean."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qtool.compile.fields import Fields
from qtool.errors import QtoolError, nearest


@dataclass(frozen=True)
class Rope:
    """A rotary embedding (RoFormer, section 3.2.2) over the two halves of a head's first `dim` features.

    The features beyond them pass unchanged.
    """

    head_dim: int
    theta: float
    radians: tuple[float, ...]
    """What each pair of features turns by in a position, [dim / 2]."""
    max_context: int
    """Positions that it holds for."""
    magnitude: float = 1.0
    """What cosine and sine are multiplied by."""

    @property
    def dim(self) -> int:
        """The features of a head that are turned."""
        return 2 * len(self.radians)

    def frequencies(self) -> NDArray[np.float32]:
        """Radians a position, [dim / 2]."""
        return np.array(self.radians, np.float32)


def plain_rope(head_dim: int, max_context: int, theta: float, dim: int | None = None) -> Rope:
    """The embedding as it was published, over the first `dim` features of a head, or all."""
    dim = dim or head_dim
    return Rope(head_dim, theta, tuple(theta ** (-pair / dim) for pair in range(0, dim, 2)), max_context)


def read_rope(
    fields: Fields, head_dim: int, max_context: int, *, theta: float = 10_000.0, may_be_partial: bool = False
) -> Rope:
    """The rotary embedding of a config: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``.

    `theta` is the family's own, for a config without. Raises QtoolError for an unknown kind or parameter.
    """
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    values = fields.section(name)
    if fields.has("rope_scaling") and name != "rope_scaling":
        fields.refuse("rope_scaling", "rope_parameters alone")
    return _read(fields, values, head_dim, max_context, theta, may_be_partial)


def read_rope_section(values: Fields, head_dim: int, max_context: int, theta: float) -> Rope:
    """The rotary embedding that one object describes completely; `theta` is the family's own."""
    return _read(values, values, head_dim, max_context, theta, may_be_partial=False)


def _read(
    outer: Fields, values: Fields, head_dim: int, max_context: int, theta: float, may_be_partial: bool
) -> Rope:
    """`values` says what kind it is; some of its parameters may stand in `outer` instead."""
    kind = values.text("rope_type", values.text("type", "default"))
    if kind not in _SCALINGS:
        raise QtoolError(f"{values.where}rope_type {kind!r} is not supported; {nearest(kind, _SCALINGS)}")
    partial = _either(outer, values, "partial_rotary_factor", 1.0)
    if partial > 1 or (partial < 1 and not may_be_partial):
        holder = values if values.has("partial_rotary_factor") else outer
        holder.refuse("partial_rotary_factor", "1.0, all that is supported for this architecture")
    theta = _either(outer, values, "rope_theta", theta)
    original = _either(outer, values, "original_max_position_embeddings", max_context)
    plain = plain_rope(head_dim, max_context, theta, int(head_dim * partial))
    rope = _SCALINGS[kind](values, plain, original)
    values.finish(())
    return rope


def _either(outer: Fields, values: Fields, name: str, default: float) -> float:
    """A number that stands in one of two places; in both, it is the same."""
    outside = outer.number(name, default)
    number = values.number(name, outside)
    if outer.has(name) and number != outside:
        outer.refuse(name, f"{number}, as {values.where.rpartition(' ')[2].removesuffix('.')} says")
    return number


def _default(values: Fields, rope: Rope, original: float) -> Rope:
    return rope


def _linear(values: Fields, rope: Rope, original: float) -> Rope:
    factor = values.number("factor")
    return replace(rope, radians=tuple(radians / factor for radians in rope.radians))


def _llama3(values: Fields, rope: Rope, original: float) -> Rope:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    if low >= high:
        values.refuse("high_freq_factor", f"more than low_freq_factor ({low:g})")
    turns = (original * radians / (2 * math.pi) for radians in rope.radians)
    kept = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    return _stretched(rope, values.number("factor"), kept)


def _yarn(values: Fields, rope: Rope, original: float) -> Rope:
    """YaRN (Peng et al. 2023, sections 3.2 and 3.4): its bounds are counted in pairs of features."""
    factor = values.number("factor")
    if rope.theta <= 1:
        raise QtoolError(f"{values.where}rope_theta: is {rope.theta:g}, wanted more than 1 for yarn")

    def pair(turns: float) -> float:
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(values.number("beta_fast", 32.0)), pair(values.number("beta_slow", 1.0))
    if values.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    span = last - first or 0.001
    kept = [1 - min(max((index - first) / span, 0.0), 1.0) for index in range(len(rope.radians))]
    magnitude = values.number("attention_factor", 1 + 0.1 * math.log(max(factor, 1)))
    return replace(
        _stretched(rope, factor, kept), magnitude=magnitude, max_context=int(original * max(factor, 1))
    )


def _longrope(values: Fields, rope: Rope, original: float) -> Rope:
    """LongRoPE (Ding et al. 2024), up to the context before the extension.

    The long factors hold for all tokens of a sequence once it is longer than that, so the keys in a pool
    would have to be computed again: an engine ends before.
    """
    pairs = len(rope.radians)
    short, _ = (values.numbers(name, pairs) for name in ("short_factor", "long_factor"))
    factor = values.number("factor", rope.max_context / original)
    suggested = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        rope,
        radians=tuple(radians / divisor for radians, divisor in zip(rope.radians, short, strict=True)),
        magnitude=values.number("attention_factor", suggested),
        max_context=min(int(original), rope.max_context),
    )


def _stretched(rope: Rope, factor: float, kept: list[float]) -> Rope:
    """Waves `factor` times as long, but for the share of each that is kept as it was."""
    pairs = zip(rope.radians, kept, strict=True)
    return replace(rope, radians=tuple(radians * (keep + (1 - keep) / factor) for radians, keep in pairs))


_SCALINGS: dict[str, Callable[[Fields, Rope, float], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its name before
}
