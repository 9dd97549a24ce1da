"""Search each group's range: clip its largest weights where finer steps for the others pay more."""

from collections.abc import Callable

import torch
from torch import Tensor

from qtool.core.schemes import IntScheme
from qtool.quantize.methods.grid import Grid, extremes, fit_grid, grouped, spanning

_RATIOS = tuple(1 - step / 40 for step in range(21))
"""1.0 down to 0.5, the range that AWQ's authors search."""
_ROWS = 1024
"""Rows that are searched at once: what is computed of them stays in a processor's cache."""


def _ratios(scheme: IntScheme) -> tuple[float, ...]:
    # A symmetric grid has no code for the largest weight when that is positive: half a step is lost. Where
    # the inputs of that weight are loud, a range wide enough for it is worth more than fine steps.
    return ((scheme.high - scheme.low) / (2 * scheme.high), *_RATIOS) if scheme.symmetric else _RATIOS


def search_clip(weight: Tensor, scheme: IntScheme, dtype: torch.dtype, second_moment: Tensor) -> Tensor:
    """The ratio [N, G] by which to shrink (or, when symmetric, slightly widen) the groups' ranges.

    For a weight [N, K]: least output error ``Δw H_g Δwᵀ`` of each group on its own, with H_g the group's
    block on the diagonal of `second_moment` [K, K] (Lin et al. 2023, section 3.2 and their code's clip
    search).
    """
    blocks = _diagonal_blocks(second_moment, scheme.num_groups(weight.shape[1]))
    return _search(
        weight, scheme, dtype, lambda error: (torch.einsum("ngi,gij->ngj", error, blocks) * error).sum(-1)
    )


def search_range(
    weight: Tensor, scheme: IntScheme, dtype: torch.dtype, importance: Tensor | None = None
) -> Grid:
    """The grid of least square error of a weight [N, K], each column weighed by `importance` [K] if given."""
    weights = 1.0 if importance is None else grouped(importance[None], scheme)
    ratio = _search(weight, scheme, dtype, lambda error: error.square_().mul_(weights).sum(-1))
    return fit_grid(weight, scheme, dtype, ratio)


def _search(
    weight: Tensor, scheme: IntScheme, dtype: torch.dtype, power: Callable[[Tensor], Tensor]
) -> Tensor:
    """The ratio [N, G] of least `power`, which gives that of errors [N, G, g] as [N, G] and may overwrite
    them."""
    parts = [weight[start : start + _ROWS] for start in range(0, len(weight), _ROWS)]
    return torch.cat([_search_rows(part, scheme, dtype, power) for part in parts])


def _search_rows(
    weight: Tensor, scheme: IntScheme, dtype: torch.dtype, power: Callable[[Tensor], Tensor]
) -> Tensor:
    values = grouped(weight, scheme)
    ends = extremes(values, scheme)
    best_error = torch.full(values.shape[:2], torch.inf, device=values.device)
    best_ratio = torch.ones(values.shape[:2], device=values.device)
    for ratio in _ratios(scheme):
        error = power(spanning(ends, scheme, dtype, ratio).error(values))
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_ratio = torch.where(better, ratio, best_ratio)
    return best_ratio


def _diagonal_blocks(second_moment: Tensor, groups: int) -> Tensor:
    """[G, g, g] from [K, K]."""
    size = len(second_moment) // groups
    blocks = second_moment.view(groups, size, groups, size)
    index = torch.arange(groups, device=second_moment.device)
    return blocks[index, :, index]
