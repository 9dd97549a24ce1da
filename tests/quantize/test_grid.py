import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qtool.core.schemes import IntScheme
from qtool.quantize.methods.clip import search_clip, search_range
from qtool.quantize.methods.grid import Grid, fit_grid, grouped

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, IntScheme]:
    """A weight of odd shape and any magnitude that fp16 holds, with a scheme for it."""
    group_size = draw(st.sampled_from([3, 8, 17, 32]))
    groups, out_features = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    torch.manual_seed(draw(st.integers(0, 1000)))
    weight = torch.randn(out_features, groups * group_size) * 10.0 ** draw(st.integers(-7, 4))
    weight += draw(st.sampled_from([0.0, 1.0])) * weight.abs().max()
    whole = draw(st.booleans())
    scheme = IntScheme(draw(st.sampled_from([4, 8])), None if whole else group_size, draw(st.booleans()))
    return weight, scheme


@settings(max_examples=150, deadline=None)
@given(weights(), st.sampled_from(DTYPES))
def test_no_weight_moves_by_more_than_the_grid_allows(
    case: tuple[Tensor, IntScheme], dtype: torch.dtype
) -> None:
    weight, scheme = case
    grid = fit_grid(weight, scheme, dtype)
    assert bool((grid.scale > 0).all())
    assert bool(grid.scale.isfinite().all())
    error = grouped(grid.quantize(weight).dequantize() - weight, scheme).abs()
    span = grouped(weight, scheme).abs().amax(-1, keepdim=True)
    scale = grid.scale[..., None].float()
    # A step: half for rounding, half for the zero point's rounding or the symmetric range's missing code. And
    # what the scale lost when it was stored, on the whole span: its dtype's eps, or fp16's least number.
    stored = span * torch.finfo(dtype).eps + (1 << scheme.num_bits) * 2.0**-24 * (dtype == torch.float16)
    assert bool((error <= scale * 1.001 + stored).all())


@settings(max_examples=50, deadline=None)
@given(weights(), st.sampled_from(DTYPES))
def test_what_is_quantized_stays_on_its_grid(case: tuple[Tensor, IntScheme], dtype: torch.dtype) -> None:
    weight, scheme = case
    grid = fit_grid(weight, scheme, dtype)
    quantized, values = grid.quantize(weight), grouped(weight, scheme)
    assert quantized.codes.dtype == torch.int8
    assert int(quantized.codes.min()) >= scheme.low
    assert int(quantized.codes.max()) <= scheme.high
    assert torch.equal(grid.error(values), grouped(quantized.dequantize(), scheme) - values)
    assert torch.equal(grid.quantize(quantized.dequantize()).codes, quantized.codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_zeros_stays_zero_under_a_scale_that_is_not(symmetric: bool, dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 32)
    weight[1, 16:] = 0.25
    grid = fit_grid(weight, IntScheme(4, 16, symmetric), dtype)
    assert bool((grid.scale > 0).all())
    assert torch.equal(grid.quantize(weight).dequantize()[0], weight[0])


@pytest.mark.parametrize("value", [0.25, -0.25])
def test_a_constant_group_is_exact_when_asymmetric(value: float) -> None:
    weight = torch.full((2, 16), value)
    grid = fit_grid(weight, IntScheme(4, 16, symmetric=False), torch.float32)
    assert torch.allclose(grid.quantize(weight).dequantize(), weight, rtol=1e-6)


def test_a_scale_below_fp16_does_not_become_zero() -> None:
    weight = torch.full((1, 8), 1e-8)
    grid = fit_grid(weight, IntScheme(4, 8, symmetric=True), torch.float16)
    assert float(grid.scale) == 2.0**-24


def test_codes_are_chosen_for_the_scale_that_is_stored() -> None:
    torch.manual_seed(0)
    weight, scheme = torch.randn(64, 64), IntScheme(8, None, symmetric=True)
    grid = fit_grid(weight, scheme, torch.bfloat16)
    nearest = (weight / grid.scale.float()).round().clamp(-128, 127)
    assert torch.equal(grid.quantize(weight).codes.float(), nearest)


def test_zero_points_are_chosen_for_the_scale_that_is_stored() -> None:
    torch.manual_seed(0)
    weight, scheme = torch.rand(300, 64), IntScheme(8, None, symmetric=False)
    weight[:, 0] = -torch.rand(300) * 10
    grid = fit_grid(weight, scheme, torch.bfloat16)
    wanted = (scheme.low - weight.amin(-1, keepdim=True) / grid.scale.float()).round().clamp(max=scheme.high)
    assert grid.zero_point is not None
    assert torch.equal(grid.zero_point.float(), wanted)


@pytest.mark.parametrize("importance", [None, torch.arange(1.0, 97.0)], ids=["even", "weighed"])
def test_a_searched_range_never_loses_against_the_full_one(importance: Tensor | None) -> None:
    torch.manual_seed(0)
    weight, scheme = torch.randn(7, 96) ** 3, IntScheme(4, 32, symmetric=False)
    weights = torch.ones(96) if importance is None else importance

    def loss(grid: Grid) -> Tensor:
        return ((grid.quantize(weight).dequantize() - weight).square() * weights).sum(-1)

    searched = loss(search_range(weight, scheme, torch.float16, importance))
    whole = loss(fit_grid(weight, scheme, torch.float16))
    assert bool((searched <= whole * 1.0001).all())
    assert float(searched.sum()) < float(whole.sum())


def test_the_clip_search_never_loses_against_the_full_range() -> None:
    torch.manual_seed(0)
    weight, scheme = torch.randn(7, 96) ** 3, IntScheme(4, 32, symmetric=False)
    x = torch.randn(500, 96) @ torch.randn(96, 96)
    moment = x.T @ x / len(x)
    blocks = torch.block_diag(*[torch.ones(32, 32)] * 3) * moment
    ratio = search_clip(weight, scheme, torch.float16, moment)
    assert ratio.shape == (7, 3)
    assert float(ratio.min()) < 1

    def loss(ratio: Tensor | float) -> Tensor:
        error = fit_grid(weight, scheme, torch.float16, ratio).quantize(weight).dequantize() - weight
        return ((error @ blocks) * error).sum(-1)

    assert bool((loss(ratio) <= loss(1.0) * 1.0001).all())
    assert float(loss(ratio).sum()) < float(loss(1.0).sum())
