"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): share the range of loud inputs with the weights.

Rounded activations lose most where one channel is far louder than the others, since all of a token share
its range. Dividing the inputs by a scale and multiplying the weights by it moves that range to where a scale
for each channel, or group, takes care of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics, pooled
from qtool.core.schemes import ActivationScheme, WeightScheme
from qtool.quantize.activations import calibrated
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.methods.scale import ChannelScale, floored

_ALPHAS = tuple(step / 20 for step in range(21))
_ROWS = 256
"""Output channels whose error a candidate is judged by, evenly spaced."""


def search_smoothing(
    weights: Sequence[Tensor],
    statistics: Sequence[InputStatistics],
    schemes: Sequence[WeightScheme],
    activations: Sequence[ActivationScheme | None],
    dtype: torch.dtype,
    *,
    powers_of_two: bool = False,
) -> ChannelScale:
    """The `smoothing_scale` whose alpha loses least, for weights [N_i, K] that share an input.

    The paper leaves alpha to the user, and the best differs from layer to layer. A candidate's error is that
    of the linears' outputs, weights and inputs rounded, on tokens that are held out from its ranges: where
    every channel is as loud as the loudest, what is a little louder than all before is cut off. It is taken
    relative to a token's output, or to the median one's where that is larger.
    """

    def candidate(alpha: float, seen: InputStatistics) -> ChannelScale:
        found = smoothing_scale(weights, seen, alpha)
        return found.in_powers_of_two() if powers_of_two else found

    rest = [replace(seen, low=seen.held_out.low, high=seen.held_out.high) for seen in statistics]
    earlier = pooled(rest)

    def error(alpha: float) -> float:
        scale, total = candidate(alpha, earlier).scale, 0.0
        for weight, seen, scheme, activation in zip(weights, rest, schemes, activations, strict=True):
            tokens = seen.held_out.tokens
            if not len(tokens):
                continue
            rows, inputs = weight[:: -(-len(weight) // _ROWS)], calibrated(activation, seen.divided(scale))
            given = tokens / scale if inputs is None else inputs.fake_quantize(tokens / scale)
            wanted = tokens @ rows.T
            lost = given @ rtn(rows * scale, scheme, dtype).dequantize().T - wanted
            power = wanted.square().sum(1)
            total += float((lost.square().sum(1) / torch.maximum(power, power.median())).mean())
        return total

    return candidate(min(_ALPHAS, key=error), pooled(statistics))


def smoothing_scale(weights: Sequence[Tensor], statistics: InputStatistics, alpha: float) -> ChannelScale:
    """``max|x|^alpha / max|w|^(1 - alpha)`` for all linears that share an input, weights [N_i, K].

    Equation 4 of the paper, normalised as AWQ does: only the ratios of channels matter.
    """
    inputs = floored(statistics.max_abs)
    largest = floored(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))
    scale = inputs**alpha / largest ** (1 - alpha)
    return ChannelScale(scale / (scale.max() * scale.min()).sqrt(), alpha)
