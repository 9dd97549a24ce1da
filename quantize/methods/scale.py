"""Channel scales: what AWQ and SmoothQuant move from the inputs of linears into their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-4
"""Channels that see (almost) nothing are treated as seeing this share of the largest."""


@dataclass(frozen=True)
class ChannelScale:
    """scale [K]: weight columns are multiplied by it, inputs divided. alpha is the exponent it came from."""

    scale: Tensor
    alpha: float

    def in_powers_of_two(self) -> "ChannelScale":
        """The nearest powers of two, by which floats of any width are multiplied exactly."""
        return ChannelScale(self.scale.log2().round().exp2(), self.alpha)


def floored(magnitude: Tensor) -> Tensor:
    """Magnitudes [K] to make scales of: none zero, and all one where all are."""
    largest = magnitude.max()
    return magnitude.clamp(min=float(largest) * _LEAST) if largest > 0 else torch.ones_like(magnitude)
