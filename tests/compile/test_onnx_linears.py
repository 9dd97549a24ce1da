"""Linears of every scheme in ONNX graphs: the numbers of the reference, as ONNX Runtime computes them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qtool.compile.stack import stack
from qtool.core.qtensor import Linear, QuantizedTensor
from qtool.core.schemes import Fp4Scheme, IntScheme, LinearScheme, WeightScheme
from qtool.runtime.engines.onnx import open_session
from tests.compile.linears import (
    BY_CODES,
    INT8,
    NVFP4,
    ROUNDED,
    WEIGHTS,
    inputs,
    linear_of,
    reference,
    write_linear,
)

BOUND = 1e-5
"""Of the largest output: float32 sums in another order, of which a far zero point cancels most."""


def computed(folder: Path, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    session = open_session(write_linear(linear, folder), 1)
    return torch.from_numpy(session.run(["y"], {"x": x[None].numpy()})[0][0])


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < BOUND


@pytest.mark.parametrize("scheme", WEIGHTS, ids=str)
def test_weights_of_every_format_are_the_same_numbers(scheme: WeightScheme, tmp_path: Path) -> None:
    linear, x = linear_of(LinearScheme(scheme), 37, 96), inputs(5, 96)
    assert_same(computed(tmp_path, linear, x), reference(x, linear))


@pytest.mark.parametrize("scheme", [*BY_CODES, NVFP4, *ROUNDED], ids=str)
def test_rounded_inputs_are_rounded_alike(scheme: LinearScheme, tmp_path: Path) -> None:
    linear, x = linear_of(scheme, 37, 96), inputs(7, 96)
    assert_same(computed(tmp_path, linear, x), reference(x, linear))


def test_linears_with_global_scales_of_their_own_become_one(tmp_path: Path) -> None:
    linears = [linear_of(LinearScheme(Fp4Scheme("nvfp4")), size, 96, seed=size) for size in (37, 5)]
    x = inputs(5, 96)
    found = computed(tmp_path, stack(linears), x)
    assert_same(found, torch.cat([reference(x, linear) for linear in linears], 1))


def test_inputs_in_another_order_are_rounded_as_they_come(tmp_path: Path) -> None:
    linear = linear_of(LinearScheme(IntScheme(8, 32, True), INT8), 37, 96)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3))
    linear, x = replace(linear, order=order), inputs(5, 96)
    assert_same(computed(tmp_path, linear, x), reference(x, linear))


def test_sums_of_the_largest_codes_neither_saturate_nor_overflow(tmp_path: Path) -> None:
    """Kernels that add pairs of products in 16 bits exist; so do results in float16."""
    linear = linear_of(LinearScheme(IntScheme(8, None, True), INT8), 3, 1536)
    weight = linear.weight
    assert isinstance(weight, QuantizedTensor)
    linear = replace(linear, weight=replace(weight, codes=torch.full_like(weight.codes, 127)))
    x = torch.full((2, 1536), 8.0)
    assert_same(computed(tmp_path, linear, x), reference(x, linear))
