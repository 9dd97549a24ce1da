"""Weights rounded to small floats."""

import pytest
import torch

from qtool.core.fp4 import fp4_codes, fp4_values
from qtool.core.schemes import Fp8Scheme
from qtool.quantize.fused import fused_with
from qtool.quantize.methods.floats import (
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    shared_fp8_scale,
    shared_nvfp4_scale,
)


@pytest.fixture
def weight() -> torch.Tensor:
    """[10, 96]: normal, with a row of zeros, a row of almost zeros, a loud row and an outlier."""
    weight = torch.randn(10, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[1], weight[2] = 0, weight[2] * 1e-7
    weight[3] *= 1000
    weight[4, 5] = 3.0
    return weight


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted).pow(2).mean() / wanted.pow(2).mean()).sqrt())


@pytest.mark.parametrize("shape", [(1, None), (None, None), (4, 32), (1, 32), (64, 64)])
def test_fp8_keeps_each_weight_within_its_three_bits(
    shape: tuple[int | None, int | None], weight: torch.Tensor
) -> None:
    scheme = Fp8Scheme(*shape)
    rounded = quantize_fp8(weight, scheme, torch.float32)
    assert rounded.scale.shape == scheme.grid(10, 96)
    # half a step of three bits of mantissa, or of the least number
    allowed = torch.maximum(weight.abs() / 16, rounded.scales() * 2**-10) * 1.001
    assert bool(((rounded.dequantize() - weight).abs() <= allowed).all())


def test_a_scale_that_bfloat16_rounds_down_makes_the_largest_weight_the_largest_code() -> None:
    weight = torch.tensor([[448 * (1 + 2**-9), 1.0]])
    rounded = quantize_fp8(weight, Fp8Scheme(1, None), torch.bfloat16)
    assert rounded.codes.float().tolist() == [[448.0, 1.0]]


def test_linears_that_engines_fuse_can_share_one_scale(weight: torch.Tensor) -> None:
    other = weight[:3] * 5
    scale = shared_fp8_scale([weight, other], torch.float32)
    for one in (weight, other):
        rounded = quantize_fp8(one, Fp8Scheme(None, None), torch.float32, scale)
        assert rounded.scale is scale
        assert relative(rounded.dequantize(), one) < 1 / 16  # what three bits of mantissa lose at most
    factor = shared_nvfp4_scale([weight, other])
    rounded4 = quantize_nvfp4(weight, factor)
    assert rounded4.global_scale is factor
    assert float(rounded4.scale.float().max()) <= 448


@pytest.mark.parametrize("search", [False, True])
def test_nvfp4_holds_every_block_to_a_step_of_its_own(search: bool, weight: torch.Tensor) -> None:
    rounded = quantize_nvfp4(weight, shared_nvfp4_scale([weight]), search=search)
    found = rounded.dequantize()
    assert bool(found.isfinite().all())
    assert not bool(found[1].any())
    largest = weight.view(10, 6, 16).abs().amax(-1, keepdim=True)
    # the widest gap of e2m1 is 2 of 6; a scale of three bits of mantissa adds a sixteenth, clipping a sixth
    error = (found - weight).view(10, 6, 16).abs()[torch.tensor([0, 3, 5, 6, 7, 8, 9])]
    kept = largest[torch.tensor([0, 3, 5, 6, 7, 8, 9])]
    assert bool((error <= kept * (0.45 if search else 0.24)).all())


def test_searched_scales_never_lose(weight: torch.Tensor) -> None:
    factor = shared_nvfp4_scale([weight])
    plain = (quantize_nvfp4(weight, factor).dequantize() - weight).view(10, 6, 16).pow(2).sum(-1)
    searched = (quantize_nvfp4(weight, factor, search=True).dequantize() - weight).view(10, 6, 16)
    assert bool((searched.pow(2).sum(-1) <= plain).all())
    assert float(searched.pow(2).sum()) < 0.9 * float(plain.sum())


def test_the_search_heeds_what_inputs_are_loud(weight: torch.Tensor) -> None:
    factor, importance = (
        shared_nvfp4_scale([weight]),
        torch.rand(96, generator=torch.Generator().manual_seed(1)) ** 4,
    )
    plain = quantize_nvfp4(weight, factor, search=True).dequantize() - weight
    heeding = quantize_nvfp4(weight, factor, search=True, importance=importance).dequantize() - weight
    assert float((heeding**2 * importance).sum()) < float((plain**2 * importance).sum())


def test_the_global_scale_is_a_power_of_two_with_which_all_scales_fit(weight: torch.Tensor) -> None:
    factor = float(shared_nvfp4_scale([weight]))
    assert torch.frexp(torch.tensor(factor)).mantissa.item() == 0.5
    assert 224 <= float(weight.abs().max()) / 6 / factor <= 448
    assert float(shared_nvfp4_scale([torch.zeros(2, 16)])) == 1.0


def test_mxfp4_takes_the_better_of_two_powers_of_two(weight: torch.Tensor) -> None:
    rounded = quantize_mxfp4(weight)
    found = rounded.dequantize()
    assert bool(found.isfinite().all())
    assert not bool(found[1].any())
    scales = rounded.scale.float()
    for factor in (0.5, 2.0):
        blocks = weight.view(10, 3, 32) / (scales * factor)[..., None]
        other = (fp4_values(fp4_codes(blocks)) * (scales * factor)[..., None]).view(10, 96)
        mine, theirs = ((one - weight).view(10, 3, 32).pow(2).sum(-1) for one in (found, other))
        assert bool((mine <= theirs * 1.0001).all())


def test_modules_that_engines_fuse_are_found() -> None:
    layer = "model.layers.3."
    modules = [
        f"{layer}{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.up_proj")
    ]
    assert fused_with(f"{layer}self_attn.v_proj", modules) == (
        f"{layer}self_attn.q_proj",
        f"{layer}self_attn.v_proj",
    )
    assert fused_with(f"{layer}mlp.down_proj", modules) == (f"{layer}mlp.down_proj",)
