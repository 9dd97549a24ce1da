"""What a linear sees: second moments and magnitudes of its input, gathered over calibration windows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.finite import is_finite
from qtool.errors import QtoolError

_BLOCK = 256
"""Rows of a second moment that are used at once."""
_HELD_OUT = 256
"""Tokens that are kept as they are, at most."""


@dataclass(frozen=True)
class HeldOut:
    """Some tokens as they are, and what the others saw: to judge choices on what they were not made by.

    tokens [S, K] are evenly spaced among the later halves of windows; low and high [K] are of the earlier.
    """

    tokens: Tensor
    low: Tensor
    high: Tensor

    def divided(self, scale: Tensor) -> "HeldOut":
        """The same of ``x / scale``."""
        return HeldOut(self.tokens / scale, self.low / scale, self.high / scale)

    def to(self, device: torch.device) -> "HeldOut":
        """The same on a device."""
        return HeldOut(self.tokens.to(device), self.low.to(device), self.high.to(device))


@dataclass(frozen=True)
class InputStatistics:
    """The input x [T, K] of a linear, summed up; every tensor float32.

    second_moment [K, K] is ``xᵀx / T``; mean_abs [K] is of ``|x|``; low and high [K] are the least and the
    largest x; tokens is T.
    """

    second_moment: Tensor
    mean_abs: Tensor
    low: Tensor
    high: Tensor
    tokens: int
    held_out: HeldOut

    @property
    def max_abs(self) -> Tensor:
        """The largest ``|x|`` of each channel, [K]."""
        return torch.maximum(-self.low, self.high)

    def divided(self, scale: Tensor) -> "InputStatistics":
        """The statistics of ``x / scale``, for positive scale [K]."""
        return InputStatistics(
            self.second_moment / (scale[:, None] * scale),
            self.mean_abs / scale,
            self.low / scale,
            self.high / scale,
            self.tokens,
            self.held_out.divided(scale),
        )

    def to(self, device: torch.device) -> "InputStatistics":
        """The same on a device."""
        if self.low.device == device:
            return self
        return InputStatistics(
            self.second_moment.to(device),
            self.mean_abs.to(device),
            self.low.to(device),
            self.high.to(device),
            self.tokens,
            self.held_out.to(device),
        )

    def output_power(self, weight: Tensor) -> float:
        """Mean over tokens of ``|weight x|²``, exactly: ``tr(W H Wᵀ)`` for weight [N, K]."""
        total = 0.0
        for start in range(0, weight.shape[1], _BLOCK):  # the moment is symmetric: half of it is enough
            end = start + _BLOCK
            products = weight[:, start:end] @ self.second_moment[start:end, start:]
            products[:, _BLOCK:] *= 2
            total += float(products.mul_(weight[:, start:]).sum(dtype=torch.float64))
        return total


def pooled(statistics: Sequence[InputStatistics]) -> InputStatistics:
    """What several linears of K inputs see together, each of their tokens counted alike.

    Linears that share one input share what they see.
    """
    first = statistics[0]
    if all(one is first for one in statistics):
        return first
    tokens = sum(one.tokens for one in statistics)
    moment, mean_abs = torch.zeros_like(first.second_moment), torch.zeros_like(first.mean_abs)
    for one in statistics:
        moment.add_(one.second_moment, alpha=one.tokens / tokens)
        mean_abs.add_(one.mean_abs, alpha=one.tokens / tokens)
    low, high = _ends([(one.low, one.high) for one in statistics])
    apart = [one.held_out for one in statistics]
    held_out = HeldOut(
        torch.cat([one.tokens for one in apart]), *_ends([(one.low, one.high) for one in apart])
    )
    return InputStatistics(moment, mean_abs, low, high, tokens, held_out)


def _ends(ranges: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    lows, highs = zip(*ranges, strict=True)
    return torch.stack(lows).amin(0), torch.stack(highs).amax(0)


class _Range:
    def __init__(self, in_features: int, device: torch.device) -> None:
        self.low = torch.full((in_features,), torch.inf, device=device)
        self.high = -self.low

    def add(self, x: Tensor) -> None:
        if len(x):
            self.low, self.high = torch.minimum(self.low, x.amin(0)), torch.maximum(self.high, x.amax(0))


class _Sums:
    def __init__(self, in_features: int, device: torch.device) -> None:
        self.second_moment = torch.zeros(in_features, in_features, device=device)
        self.sum_abs = torch.zeros(in_features, device=device)
        self.earlier, self.later = _Range(in_features, device), _Range(in_features, device)
        self.tokens = 0
        self._held_out = self.second_moment.new_empty(0, in_features)
        self._num_later, self._stride = 0, 1

    def add(self, x: Tensor) -> None:
        x = x.float()
        for start in range(0, x.shape[1], _BLOCK):  # the moment is symmetric: half of it is enough
            self.second_moment[start : start + _BLOCK, start:].addmm_(
                x[:, start : start + _BLOCK].T, x[:, start:]
            )
        self.sum_abs += x.abs().sum(0)
        earlier, later = x.tensor_split([(len(x) + 1) // 2])
        self.earlier.add(earlier)
        self.later.add(later)
        self._hold_out(later)
        self.tokens += len(x)

    def _hold_out(self, x: Tensor) -> None:
        """Keep each token whose number `_stride` divides; every second of those, when they are too many."""
        found = x[-self._num_later % self._stride :: self._stride]
        self._num_later += len(x)
        if len(found):
            self._held_out = torch.cat([self._held_out, found])
        while len(self._held_out) > _HELD_OUT:
            self._held_out, self._stride = self._held_out[::2].clone(), 2 * self._stride

    def finish(self) -> InputStatistics:
        """End the sum, in place: moments of wide linears are most of what memory has to hold."""
        tokens = self.tokens
        moment = self.second_moment.div_(tokens)
        for start in range(0, len(moment), _BLOCK):
            rows, below = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
            moment[below, rows] = moment[rows, below].T
        low, high = _ends([(part.low, part.high) for part in (self.earlier, self.later)])
        held_out = HeldOut(self._held_out, self.earlier.low, self.earlier.high)
        return InputStatistics(moment, self.sum_abs / tokens, low, high, tokens, held_out)


class Collector:
    """Sums up what linears see; those that read the same tensor share one sum."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._leader: dict[str, str] = {}
        self._latest: tuple[Tensor, str] | None = None

    @contextmanager
    def watching(self, linears: Mapping[str, nn.Linear]) -> Iterator[None]:
        """Sum up the inputs of `linears` (by full name) while the block runs the model."""
        hooks = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[0]))
            for name, linear in linears.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._latest = None

    @property
    def seen(self) -> list[str]:
        """The linears that have seen something, in the order in which they first did."""
        return list(self._leader)

    def _see(self, name: str, x: Tensor) -> None:
        if self._latest is None or self._latest[0] is not x:
            self._latest = (x, name)
        leader = self._latest[1]
        if self._leader.setdefault(name, leader) != leader:
            raise QtoolError(
                f"{name}: reads the input of {leader} on some windows only, which is not supported"
            )
        if leader != name:
            return
        if not is_finite(x):
            raise QtoolError(
                f"{name}: its input is NaN or infinite on the calibration text; check the weights"
            )
        if name not in self._sums:
            self._sums[name] = _Sums(x.shape[-1], x.device)
        self._sums[name].add(x.reshape(-1, x.shape[-1]))

    def statistics(self) -> dict[str, InputStatistics]:
        """What each watched linear saw; linears with the same input share the object. Ends the sums.

        Raises QtoolError naming the linear whose input is too large for float32 to square.
        """
        finished = {name: sums.finish() for name, sums in self._sums.items()}
        for name, seen in finished.items():
            if not is_finite(seen.second_moment):
                raise QtoolError(
                    f"{name}: its input reaches {float(seen.max_abs.max()):.1g}; check the weights"
                )
        return {name: finished[leader] for name, leader in self._leader.items()}
