"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): round column by column, and let the columns still to come
make up for each one's error."""

import logging

import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics
from qtool.core.qtensor import QuantizedTensor
from qtool.core.recipe import Gptq
from qtool.core.schemes import IntScheme
from qtool.errors import QtoolError
from qtool.quantize.methods.clip import search_clip
from qtool.quantize.methods.grid import Grid, fit_grid

logger = logging.getLogger(__name__)


def gptq(
    weight: Tensor, statistics: InputStatistics, scheme: IntScheme, options: Gptq, dtype: torch.dtype
) -> QuantizedTensor:
    """Quantize a weight [N, K] for the least output error on the second moment of its inputs.

    Each group's grid is fixed from the original weight first ("static groups"), so columns may be taken in
    any order while the stored tensor keeps its own: no ``g_idx``. With `search_range` two grids are tried,
    of whole and of searched ranges, since neither always wins, and the one with the lower output error is
    kept. Raises QtoolError when no damping makes the Hessian invertible.
    """
    moment = statistics.second_moment
    order = torch.arange(weight.shape[1])
    if options.activation_order:
        order = moment.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(moment[order][:, order], options.damping)
    grids = [fit_grid(weight, scheme, dtype)]
    if options.search_range:
        grids.append(fit_grid(weight, scheme, dtype, search_clip(weight, scheme, dtype, moment)))
    found = [_round_columns(weight, grid, order, factor, options.block_size) for grid in grids]
    return min(found, key=lambda quantized: statistics.output_power(quantized.dequantize() - weight))


def _round_columns(
    weight: Tensor, grid: Grid, order: Tensor, factor: Tensor, block_size: int
) -> QuantizedTensor:
    """Algorithm 1 of the paper: updates go to the rest of a block of columns at once, and to the blocks after
    it when the block is done."""
    in_features = weight.shape[1]
    group_of = (order // (in_features // grid.scale.shape[1])).tolist()
    remaining = weight[:, order].clone()
    codes = torch.empty_like(remaining)
    for start in range(0, in_features, block_size):
        end = min(start + block_size, in_features)
        block, inner = remaining[:, start:end], factor[start:end, start:end]
        errors = torch.empty_like(block)
        for column in range(end - start):
            value = block[:, column : column + 1]
            code = grid.codes(value, group_of[start + column])
            error = (value - grid.values(code, group_of[start + column])) / inner[column, column]
            block[:, column:] -= error * inner[column, column:]
            codes[:, start + column] = code[:, 0]
            errors[:, column] = error[:, 0]
        remaining[:, end:] -= errors @ factor[start:end, end:]
    original = torch.empty_like(codes, dtype=torch.int8)
    original[:, order] = codes.to(torch.int8)
    return QuantizedTensor(original, grid.scale, grid.zero_point, grid.scheme)


def inverse_factor(moment: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian [K, K] (step 3 of the paper, section 3.3).

    Damping is a share of the mean diagonal; it is raised tenfold, with a warning, while the matrix is
    singular in float32.
    """
    diagonal = moment.diagonal()
    mean = float(diagonal.mean()) or 1.0
    while damping < 100:
        damped = moment + torch.diag(torch.full_like(diagonal, damping * mean))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
        logger.warning("the Hessian is singular at damping %g; trying %g", damping, damping * 10)
        damping *= 10
    raise QtoolError("the Hessian stays singular with any damping; calibrate on more, or other, text")
