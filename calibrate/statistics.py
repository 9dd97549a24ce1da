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
    low = torch.stack([one.low for one in statistics]).amin(0)
    high = torch.stack([one.high for one in statistics]).amax(0)
    return InputStatistics(moment, mean_abs, low, high, tokens)


class _Sums:
    def __init__(self, in_features: int, device: torch.device) -> None:
        self.second_moment = torch.zeros(in_features, in_features, device=device)
        self.sum_abs = torch.zeros(in_features, device=device)
        self.low = torch.full((in_features,), torch.inf, device=device)
        self.high = -self.low
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        x = x.float()
        for start in range(0, x.shape[1], _BLOCK):  # the moment is symmetric: half of it is enough
            self.second_moment[start : start + _BLOCK, start:].addmm_(
                x[:, start : start + _BLOCK].T, x[:, start:]
            )
        self.sum_abs += x.abs().sum(0)
        self.low, self.high = torch.minimum(self.low, x.amin(0)), torch.maximum(self.high, x.amax(0))
        self.tokens += len(x)

    def finish(self) -> InputStatistics:
        """End the sum, in place: moments of wide linears are most of what memory has to hold."""
        tokens = self.tokens
        moment = self.second_moment.div_(tokens)
        for start in range(0, len(moment), _BLOCK):
            rows, below = slice(start, start + _BLOCK), slice(start + _BLOCK, None)
            moment[below, rows] = moment[rows, below].T
        return InputStatistics(moment, self.sum_abs / tokens, self.low, self.high, tokens)


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
