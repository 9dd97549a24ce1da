"""Search the channel scales that a layer's methods ask for, and fold them into the layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.statistics import InputStatistics, pooled
from qtool.core.recipe import Awq, AwqGptq, Best, SmoothQuant
from qtool.quantize.folding import absorbers, fold
from qtool.quantize.methods.awq import search_scale
from qtool.quantize.methods.scale import ChannelScale
from qtool.quantize.methods.smoothquant import search_smoothing, smoothing_scale
from qtool.quantize.plan import Assignment

Scaling = Awq | AwqGptq | Best | SmoothQuant
"""The methods that scale channels."""


@dataclass(frozen=True)
class Folded:
    """What absorbed the scales of a linear's inputs, and the exponent that they came from."""

    source: str
    alpha: float


def fold_scales(
    prefix: str,
    layer: nn.Module,
    assigned: Mapping[str, Assignment],
    statistics: dict[str, InputStatistics],
    dtypes: Mapping[str, torch.dtype],
    update: Callable[[], Tensor],
) -> dict[str, Folded]:
    """Fold scales wherever the layer can absorb them exactly; `statistics` follows, by full module name.

    Readers of the same input that ask for no scales are compensated, not searched for. Where a router is one,
    scales are powers of two: its weights absorb them bit by bit, so that no token goes to another expert.
    """
    options = {module: one.method for module, one in assigned.items() if isinstance(one.method, Scaling)}
    folded: dict[str, Folded] = {}
    if not options:
        return folded
    for absorber in absorbers(layer, update):
        readers = [f"{prefix}.{reader}" for reader in absorber.readers]
        asking = [module for module in readers if module in options]
        if not asking:
            continue
        found = _scale(
            [layer.get_parameter(f"{module.removeprefix(prefix + '.')}.weight") for module in asking],
            [statistics[module] for module in asking],
            [assigned[module] for module in asking],
            options[asking[0]],
            dtypes[f"{asking[0]}.weight"],
            powers_of_two=absorber.routes,
        )
        fold(layer, absorber, found.scale)
        for module in readers:
            if module in statistics:
                statistics[module] = statistics[module].divided(found.scale)
        folded |= dict.fromkeys(asking, Folded(absorber.source, found.alpha))
    return folded


def _scale(
    weights: list[Tensor],
    seen: list[InputStatistics],
    assigned: list[Assignment],
    method: Scaling,
    dtype: torch.dtype,
    *,
    powers_of_two: bool,
) -> ChannelScale:
    schemes = [one.scheme for one in assigned]
    if isinstance(method, SmoothQuant):
        if method.alpha is None:
            activations = [one.activation for one in assigned]
            return search_smoothing(weights, seen, schemes, activations, dtype, powers_of_two=powers_of_two)
        found = smoothing_scale(weights, pooled(seen), method.alpha)
        return found.in_powers_of_two() if powers_of_two else found
    return search_scale(weights, seen, schemes, method.grid, dtype, powers_of_two=powers_of_two)
