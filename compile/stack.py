"""Linears over one input as one linear, whose product is split: fewer and larger matrix products."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Linear, QuantizedTensor, Weight
from qtool.core.schemes import WeightScheme


def alike(group: Sequence[Linear]) -> bool:
    """Whether linears over one input can be one: of one dtype or scheme, inputs ordered and rounded alike."""
    kinds = {(_kind(linear.weight), linear.activation, _key(linear.order)) for linear in group}
    return len(group) > 1 and len(kinds) == 1


def _kind(weight: Weight) -> torch.dtype | WeightScheme:
    if isinstance(weight, Tensor):
        return weight.dtype
    return weight.by_row().scheme if isinstance(weight, Fp8Tensor) else weight.scheme


def _key(order: Tensor | None) -> bytes | None:
    return None if order is None else order.numpy().tobytes()


def stack(group: Sequence[Linear]) -> Linear:
    """One linear whose outputs are those of `group`, one after another; they have to be `alike`."""
    weights = [linear.weight for linear in group]
    return replace(group[0], weight=_stack_weights(weights), bias=_stack_biases(group))


def _stack_weights(weights: Sequence[Weight]) -> Weight:
    if integers := [weight for weight in weights if isinstance(weight, QuantizedTensor)]:
        return _stack_integers(integers)
    if fp8 := [weight.by_row() for weight in weights if isinstance(weight, Fp8Tensor)]:
        return _stack_fp8(fp8)
    if fp4 := [weight.by_row() for weight in weights if isinstance(weight, Fp4Tensor)]:
        return _stack_fp4(fp4)
    return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])


def _stack_integers(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    zero_points = [weight.zero_point for weight in weights if weight.zero_point is not None]
    return QuantizedTensor(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scale.float() for weight in weights]),
        torch.cat(zero_points) if zero_points else None,
        weights[0].scheme,
    )


def _stack_fp8(weights: Sequence[Fp8Tensor]) -> Fp8Tensor:
    return Fp8Tensor(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scale.float() for weight in weights]),
        weights[0].scheme,
    )


def _stack_fp4(weights: Sequence[Fp4Tensor]) -> Fp4Tensor:
    factors = [weight.global_scale for weight in weights if weight.global_scale is not None]
    return Fp4Tensor(
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scale.view(torch.uint8) for weight in weights]).view(weights[0].scale.dtype),
        torch.cat(factors) if factors else None,
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
