"""Search each group's range: clip its largest weights where finer steps for the others pay more."""

import torch
from torch import Tensor

from qtool.core.schemes import IntScheme
from qtool.quantize.methods.grid import fit_grid, grouped

_RATIOS = tuple(1 - step / 40 for step in range(21))
"""1.0 down to 0.5, the range that AWQ's authors search."""


def _ratios(scheme: IntScheme) -> tuple[float, ...]:
    # A symmetric grid has no code for the largest weight when that is positive: half a step is lost. Where
    # the inputs of that weight are loud, a range wide enough for it is worth more than fine steps.
    return ((scheme.high - scheme.low) / (2 * scheme.high), *_RATIOS) if scheme.symmetric else _RATIOS


def search_clip(
    weight: Tensor, scheme: IntScheme, dtype: torch.dtype, second_moment: Tensor | None
) -> Tensor:
    """The ratio [N, G] by which to shrink (or, when symmetric, slightly widen) the groups' ranges.

    For a weight [N, K]: least output error ``Δw H_g Δwᵀ`` of each group on its own, with H_g the group's
    block on the diagonal of `second_moment` [K, K]; least square error of the weight when that is None (Lin
    et al. 2023, section 3.2 and their code's clip search).
    """
    values = grouped(weight, scheme)
    blocks = None if second_moment is None else _diagonal_blocks(second_moment, values.shape[1])
    best_error = torch.full(values.shape[:2], torch.inf)
    best_ratio = torch.ones(values.shape[:2])
    for ratio in _ratios(scheme):
        error = grouped(fit_grid(weight, scheme, dtype, ratio).fake_quantize(weight), scheme) - values
        weighted = error if blocks is None else torch.einsum("ngi,gij->ngj", error, blocks)
        power = (weighted * error).sum(-1)
        better = power < best_error
        best_error = torch.where(better, power, best_error)
        best_ratio = torch.where(better, ratio, best_ratio)
    return best_ratio


def _diagonal_blocks(second_moment: Tensor, groups: int) -> Tensor:
    """[G, g, g] from [K, K]."""
    size = len(second_moment) // groups
    blocks = second_moment.view(groups, size, groups, size)
    index = torch.arange(groups)
    return blocks[index, :, index]
