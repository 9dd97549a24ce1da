"""Linears over one input as one linear, whose product is split: fewer and larger matrix products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.core.qtensor import Linear, QuantizedTensor


def alike(group: Sequence[Linear]) -> bool:
    """Whether linears over one input can be one: all dense in one dtype, or all of one scheme."""
    kinds = {
        linear.weight.scheme if isinstance(linear.weight, QuantizedTensor) else linear.weight.dtype
        for linear in group
    }
    return len(group) > 1 and len(kinds) == 1


def stack(group: Sequence[Linear]) -> Linear:
    """One linear whose outputs are those of `group`, one after another; they have to be `alike`."""
    dense = [linear.weight for linear in group if isinstance(linear.weight, Tensor)]
    quantized = [linear.weight for linear in group if isinstance(linear.weight, QuantizedTensor)]
    return Linear(_stack_quantized(quantized) if quantized else torch.cat(dense), _stack_biases(group))


def _stack_quantized(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    zero_points = [weight.zero_point for weight in weights if weight.zero_point is not None]
    return QuantizedTensor(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scale.float() for weight in weights]),
        torch.cat(zero_points) if zero_points else None,
        weights[0].scheme,
    )


def _stack_biases(group: Sequence[Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in group):
        return None
    return torch.cat(
        [
            torch.zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.float()
            for linear in group
        ]
    )
