"""Linears as one, and one in parts, are the same numbers; what cannot be one stays apart."""

from dataclasses import replace

import pytest
import torch

from qtool.compile.layout import cut
from qtool.compile.stack import alike, stack
from qtool.core.activation import Activation
from qtool.core.qtensor import Fp8Tensor, Linear
from qtool.core.schemes import ActivationScheme, Fp8Scheme, IntScheme
from tests.compile.checkpoints import round_to

IN_FEATURES = 96
ORDER = torch.arange(IN_FEATURES).flip(0)
STATIC = Activation(ActivationScheme("int8", dynamic=False), 0.5)


def linear(out_features: int, scheme: IntScheme | Fp8Scheme | None) -> Linear:
    dense = torch.randn(out_features, IN_FEATURES, generator=torch.Generator().manual_seed(out_features))
    bias = dense[:, 0].clone()
    if scheme is None:
        return Linear(dense, bias)
    if isinstance(scheme, IntScheme):
        return Linear(round_to(dense, scheme, torch.float32), bias)
    scale = torch.rand(scheme.grid(out_features, IN_FEATURES)) + 0.5
    return Linear(Fp8Tensor(dense.to(torch.float8_e4m3fn), scale, scheme), bias)


SCHEMES = [
    None,
    IntScheme(4, 32, True),
    IntScheme(4, 32, False),
    IntScheme(8, None, True),
    Fp8Scheme(None, None),
    Fp8Scheme(1, None),
    Fp8Scheme(16, 32),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_stack_has_the_rows_of_all_and_is_cut_into_them_again(
    scheme: IntScheme | Fp8Scheme | None,
) -> None:
    group = [replace(linear(size, scheme), order=ORDER, activation=STATIC) for size in (24, 7, 40)]
    assert alike(group)
    whole, start = stack(group), 0
    for member in group:
        rows = range(start, start + member.weight.shape[0])
        part = cut(whole, rows)
        assert torch.equal(part.dense(), member.dense())
        assert member.bias is not None
        assert part.bias is not None
        assert torch.equal(part.bias, member.bias)
        assert (part.order is ORDER, part.activation) == (True, STATIC)
        start = rows.stop


@pytest.mark.parametrize(
    "other",
    [
        linear(8, None),
        linear(8, IntScheme(4, 32, False)),
        replace(linear(8, IntScheme(4, 32, True)), order=ORDER),
        replace(linear(8, IntScheme(4, 32, True)), activation=STATIC),
    ],
)
def test_linears_that_differ_stay_apart(other: Linear) -> None:
    first = linear(8, IntScheme(4, 32, True))
    assert alike([first, first])
    assert not alike([first, other])
    rounded = replace(first, activation=STATIC)
    assert not alike([rounded, replace(first, activation=replace(STATIC, scale=0.25))])
    ordered = replace(first, order=ORDER)
    assert alike([ordered, replace(first, order=ORDER.clone())])
    assert not alike([ordered, replace(first, order=ORDER.roll(1))])
