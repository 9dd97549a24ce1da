"""AWQ: activation-aware weight quantization (Lin et al. 2023, arXiv:2306.00978, section 3.2).

Input channels with large activations are scaled up before rounding, so that their weights lose less, and
the inverse scale is folded into what comes before; then each group's range is searched. The error of a
candidate is not sampled but exact: with H the second moment of the inputs, ``|ΔW x|²`` has the mean
``tr(ΔW H ΔWᵀ)``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics, pooled
from qtool.core.qtensor import Quantized
from qtool.core.schemes import IntScheme, WeightScheme
from qtool.quantize.methods.clip import search_clip
from qtool.quantize.methods.grid import fit_grid
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.methods.scale import ChannelScale, floored

_ROWS = 512
"""Output channels whose error a candidate is judged by: rows are rounded one by one, so an even sample of
them tells as much, and the search of a wide linear costs no more than that of a narrow one."""

_COARSE = 4
"""Steps of alpha that the first pass of the search takes at once."""


def search_scale(
    weights: Sequence[Tensor],
    statistics: Sequence[InputStatistics],
    schemes: Sequence[WeightScheme],
    grid: int,
    dtype: torch.dtype,
    *,
    powers_of_two: bool = False,
) -> ChannelScale:
    """The scale for all linears that share an input: weights [N_i, K], each with what it sees and its scheme.

    Experts share an input, and each sees some of its tokens.

    Tries, for alpha on a grid over [0, 1), AWQ's ``mean|x|^alpha``, and ``x^alpha / w^(1 - alpha)`` with x
    and w the root mean squares of a channel's inputs and weights. The second loses less: noise adds up in
    squares, and a group's range follows all the rows of a channel more than its largest weight. Keeps the
    least summed output error over evenly spaced rows: every fourth alpha first, then those around the best.
    alpha 0 of the first is no scaling, so nothing is lost against rounding to nearest on the calibration
    inputs.
    """
    together = pooled(statistics)
    mean, rms = floored(together.mean_abs), floored(together.second_moment.diagonal().sqrt())
    rows = torch.cat(list(weights))
    families = (mean, torch.ones_like(mean)), (rms, floored(rows.square().mean(0).sqrt()))

    def candidate(step: int, family: int) -> ChannelScale:
        alpha = step / grid
        inputs, columns = families[family]
        scale = inputs**alpha / columns ** (1 - alpha)
        found = ChannelScale(scale / (scale.max() * scale.min()).sqrt(), alpha)
        return found.in_powers_of_two() if powers_of_two else found

    def error(found: ChannelScale) -> float:
        total = 0.0
        for weight, seen, scheme in zip(weights, statistics, schemes, strict=True):
            stride = -(-len(weight) // _ROWS)
            rows = weight[::stride]
            scaled = rows * found.scale
            rounded = rtn(scaled, scheme, dtype).dequantize()
            share = seen.tokens / together.tokens
            total += stride * share * seen.output_power(rounded / found.scale - rows)
        return total

    coarse = [(step, family) for family in range(len(families)) for step in range(0, grid, _COARSE)]
    errors = {choice: error(candidate(*choice)) for choice in coarse}
    step, family = min(errors, key=errors.__getitem__)
    for near in range(max(0, step - _COARSE + 1), min(grid, step + _COARSE)):
        if near != step:
            errors[near, family] = error(candidate(near, family))
    return candidate(*min(errors, key=errors.__getitem__))


def awq(
    weight: Tensor,
    statistics: InputStatistics,
    scheme: WeightScheme,
    dtype: torch.dtype,
    *,
    clip: bool = True,
    shared: Tensor | None = None,
) -> tuple[Quantized, float]:
    """Quantize a weight [N, K] that already carries its channel scale; its mean clip ratio beside it.

    Small floats are not clipped but get the block scales of least error on the inputs; `shared` as for `rtn`.
    """
    if not clip:
        return rtn(weight, scheme, dtype, shared=shared), 1.0
    if not isinstance(scheme, IntScheme):
        importance = statistics.second_moment.diagonal()
        return rtn(weight, scheme, dtype, search=True, importance=importance, shared=shared), 1.0
    ratio = search_clip(weight, scheme, dtype, statistics.second_moment)
    return fit_grid(weight, scheme, dtype, ratio).quantize(weight), float(ratio.mean())
