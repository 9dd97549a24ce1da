"""Which of several sizes each of many things gets, so that all together lose least: exactly.

A multiple-choice knapsack. Totals that another beats in size and loss are dropped as one thing after another
is added (Nemhauser and Ullmann 1969, Discrete dynamic programming and capital allocation), so what is left in
the end is every total worth having: the Pareto curve. Layers are alike in size, so there are few totals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Option:
    """One way to store a thing: its size in bytes, and what is lost."""

    size: int
    loss: float


@dataclass(frozen=True)
class _Step:
    """Of each total after a thing was added: the total before, and the option that was chosen."""

    before: Tensor
    option: Tensor


@dataclass(frozen=True)
class Frontier:
    """Every total worth having, sizes [P] ascending in bytes, losses [P] descending."""

    sizes: Tensor
    losses: Tensor
    steps: tuple[_Step, ...]

    def within(self, size: int) -> int | None:
        """The point of least loss of at most `size` bytes; None when all are larger."""
        fitting = int((self.sizes <= min(size, int(self.sizes[-1]))).sum())
        return fitting - 1 if fitting else None

    def below(self, loss: float) -> int | None:
        """The point of least size that loses at most `loss`; None when all lose more."""
        fitting = int((self.losses <= loss).sum())
        return len(self.losses) - fitting if fitting else None

    def options(self, point: int) -> list[int]:
        """The option of each thing at a point, by its place among the thing's options."""
        chosen = []
        for step in reversed(self.steps):
            chosen.append(int(step.option[point]))
            point = int(step.before[point])
        return chosen[::-1]


def frontier(things: Sequence[Sequence[Option]]) -> Frontier:
    """The Pareto curve over all ways to choose an option for each of `things`."""
    sizes, losses = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    steps = []
    for options in things:
        size = torch.cat([sizes + option.size for option in options])
        loss = torch.cat([losses + option.loss for option in options])
        order = loss.argsort(stable=True)
        order = order[size[order].argsort(stable=True)]  # by size, equal ones by loss
        least = loss[order].cummin(0).values
        better = torch.ones(len(order), dtype=torch.bool)
        better[1:] = loss[order][1:] < least[:-1]
        kept = order[better]
        steps.append(_Step(kept % len(sizes), kept // len(sizes)))
        sizes, losses = size[kept], loss[kept]
    return Frontier(sizes, losses, tuple(steps))
