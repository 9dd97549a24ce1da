import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics
from qtool.core.schemes import IntScheme
from qtool.quantize.methods.awq import awq, search_scale
from qtool.quantize.methods.grid import fit_grid
from tests.quantize.seen import statistics_of

SCHEME = IntScheme(4, 32, symmetric=False)


def outlying_inputs() -> Tensor:
    """Inputs of which every seventh channel is thirty times as loud, as LLM activations are."""
    torch.manual_seed(0)
    x = torch.randn(400, 96)
    x[:, ::7] *= 30
    return x


def rtn_error(weight: Tensor, seen: InputStatistics, scale: Tensor) -> float:
    scaled = weight * scale
    return seen.output_power(
        fit_grid(scaled, SCHEME, torch.float16).quantize(scaled).dequantize() / scale - weight
    )


def test_loud_channels_get_larger_scales_and_the_output_error_falls() -> None:
    seen = statistics_of(outlying_inputs())
    weights = [torch.randn(40, 96), torch.randn(24, 96)]
    found = search_scale(weights, [seen, seen], [SCHEME, SCHEME], 20, torch.float16)
    assert found.alpha > 0
    assert float(found.scale[::7].min()) > float(found.scale[1::7].max())
    before, after = (sum(rtn_error(w, seen, s) for w in weights) for s in (torch.ones(96), found.scale))
    assert after < 0.5 * before


def test_a_channel_that_sees_nothing_keeps_a_positive_finite_scale() -> None:
    x = outlying_inputs()
    x[:, 5] = 0
    found = search_scale([torch.randn(8, 96)], [statistics_of(x)], [SCHEME], 20, torch.float16)
    assert bool((found.scale > 0).all())
    assert bool(found.scale.isfinite().all())


def test_inputs_of_zero_leave_the_weight_unscaled_and_quantizable() -> None:
    seen, weight = statistics_of(torch.zeros(10, 96)), torch.randn(8, 96)
    found = search_scale([weight], [seen], [SCHEME], 20, torch.float16)
    assert torch.equal(found.scale, torch.ones(96))
    quantized, _ = awq(weight, seen, SCHEME, torch.float16)
    assert bool(quantized.dequantize().isfinite().all())


def test_clipping_can_be_left_out() -> None:
    seen, weight = statistics_of(outlying_inputs()), torch.randn(8, 96)
    quantized, ratio = awq(weight, seen, SCHEME, torch.float16, clip=False)
    assert ratio == 1.0
    assert torch.equal(quantized.codes, fit_grid(weight, SCHEME, torch.float16).quantize(weight).codes)
    clipped, ratio = awq(weight, seen, SCHEME, torch.float16)
    assert ratio < 1.0
    errors = [seen.output_power(one.dequantize() - weight) for one in (clipped, quantized)]
    assert errors[0] < errors[1]
