"""Linears over one input as one linear, whose product is split: fewer and larger matrix products."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtool.core.qtensor import Fp8Tensor, Linear, QuantizedTensor
from qtool.core.schemes import Fp8Scheme, IntScheme


def alike(group: Sequence[Linear]) -> bool:
    """Whether linears over one input can be one: of one dtype or scheme, inputs ordered and rounded alike."""
    kinds = {(_kind(linear.weight), linear.activation, _key(linear.order)) for linear in group}
    return len(group) > 1 and len(kinds) == 1


def _kind(weight: Tensor | QuantizedTensor | Fp8Tensor) -> torch.dtype | IntScheme | Fp8Scheme:
    if isinstance(weight, Tensor):
        return weight.dtype
    return weight.by_row().scheme if isinstance(weight, Fp8Tensor) else weight.scheme


def _key(order: Tensor | None) -> bytes | None:
    return None if order is None else order.numpy().tobytes()


def stack(group: Sequence[Linear]) -> Linear:
    """One linear whose outputs are those of `group`, one after another; they have to be `alike`."""
    dense = [linear.weight for linear in group if isinstance(linear.weight, Tensor)]
    integers = [linear.weight for linear in group if isinstance(linear.weight, QuantizedTensor)]
    fp8 = [linear.weight.by_row() for linear in group if isinstance(linear.weight, Fp8Tensor)]
    weight = _stack_quantized(integers) if integers else _stack_fp8(fp8) if fp8 else torch.cat(dense)
    return replace(group[0], weight=weight, bias=_stack_biases(group))


def _stack_quantized(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
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


def _stack_biases(group: Sequence[Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in group):
        return None
    return torch.cat(
        [
            torch.zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.float()
            for linear in group
        ]
    )
