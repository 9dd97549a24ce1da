"""AWQ: activation-aware weight quantization (Lin et al. 2023, arXiv:2306.00978, section 3.2).

Input channels with large activations are scaled up before rounding, so that their weights lose less, and
the inverse scale is folded into what comes before; then each group's range is searched. The error of a
candidate is not sampled but exact: with H the second moment of the inputs, ``|ΔW x|²`` has the mean
``tr(ΔW H ΔWᵀ)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics
from qtool.core.qtensor import QuantizedTensor
from qtool.core.recipe import Awq
from qtool.core.schemes import IntScheme
from qtool.quantize.methods.clip import search_clip
from qtool.quantize.methods.grid import fit_grid

_ROWS = 512
"""Output channels whose error a candidate is judged by: rows are rounded one by one, so an even sample of
them tells as much, and the search of a wide linear costs no more than that of a narrow one."""

_LEAST = 1e-4
"""Channels that see (almost) nothing are treated as seeing this share of the largest."""

_COARSE = 4
"""Steps of alpha that the first pass of the search takes at once."""


@dataclass(frozen=True)
class ChannelScale:
    """scale [K]: weight columns are multiplied by it, inputs divided. alpha is the exponent it came from."""

    scale: Tensor
    alpha: float


def search_scale(
    weights: Sequence[Tensor],
    statistics: InputStatistics,
    schemes: Sequence[IntScheme],
    options: Awq,
    dtype: torch.dtype,
) -> ChannelScale:
    """The scale for all linears that share an input: weights [N_i, K], each with its scheme.

    Tries ``mean|x|^alpha`` and ``mean|x|^alpha / max|w|^(1 - alpha)`` for alpha on a grid over [0, 1),
    normalised, and keeps the least summed output error over evenly spaced rows: every fourth alpha first,
    then those around the best. alpha 0 of the first is no scaling, so the result does not lose against
    rounding to nearest on the calibration inputs.
    """
    magnitude = _floored(statistics.mean_abs)
    largest = _floored(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))

    def candidate(step: int, by_weight: bool) -> ChannelScale:
        alpha = step / options.grid
        scale = magnitude**alpha
        if by_weight:
            scale = scale / largest ** (1 - alpha)
        return ChannelScale(scale / (scale.max() * scale.min()).sqrt(), alpha)

    def error(found: ChannelScale) -> float:
        total = 0.0
        for weight, scheme in zip(weights, schemes, strict=True):
            stride = -(-len(weight) // _ROWS)
            rows = weight[::stride]
            scaled = rows * found.scale
            rounded = fit_grid(scaled, scheme, dtype).fake_quantize(scaled)
            total += stride * statistics.output_power(rounded / found.scale - rows)
        return total

    coarse = [(step, by_weight) for by_weight in (False, True) for step in range(0, options.grid, _COARSE)]
    errors = {choice: error(candidate(*choice)) for choice in coarse}
    step, by_weight = min(errors, key=errors.__getitem__)
    for near in range(max(0, step - _COARSE + 1), min(options.grid, step + _COARSE)):
        if near != step:
            errors[near, by_weight] = error(candidate(near, by_weight))
    return candidate(*min(errors, key=errors.__getitem__))


def _floored(magnitude: Tensor) -> Tensor:
    largest = magnitude.max()
    return magnitude.clamp(min=float(largest) * _LEAST) if largest > 0 else torch.ones_like(magnitude)


def awq(
    weight: Tensor, statistics: InputStatistics, scheme: IntScheme, options: Awq, dtype: torch.dtype
) -> tuple[QuantizedTensor, float]:
    """Quantize a weight [N, K] that already carries its channel scale; its mean clip ratio beside it."""
    if not options.clip:
        return fit_grid(weight, scheme, dtype).quantize(weight), 1.0
    ratio = search_clip(weight, scheme, dtype, statistics.second_moment)
    return fit_grid(weight, scheme, dtype, ratio).quantize(weight), float(ratio.mean())
