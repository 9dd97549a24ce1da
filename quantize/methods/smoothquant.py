"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): share the range of loud inputs with the weights.

Rounded activations lose most where one channel is far louder than the others, since all of a token share
its range. Dividing the inputs by a scale and multiplying the weights by it moves that range to where a scale
for each channel, or group, takes care of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics
from qtool.quantize.methods.scale import ChannelScale, floored


def smoothing_scale(weights: Sequence[Tensor], statistics: InputStatistics, alpha: float) -> ChannelScale:
    """``max|x|^alpha / max|w|^(1 - alpha)`` for all linears that share an input, weights [N_i, K].

    Equation 4 of the paper, normalised as AWQ does: only the ratios of channels matter.
    """
    inputs = floored(statistics.max_abs)
    largest = floored(torch.stack([weight.abs().amax(0) for weight in weights]).amax(0))
    scale = inputs**alpha / largest ** (1 - alpha)
    return ChannelScale(scale / (scale.max() * scale.min()).sqrt(), alpha)
