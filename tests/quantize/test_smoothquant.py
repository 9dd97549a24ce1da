"""SmoothQuant's scale, given an alpha and with the alpha searched."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qtool.calibrate.statistics import HeldOut, InputStatistics
from qtool.core.schemes import ActivationScheme, IntScheme
from qtool.quantize.activations import calibrated
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.methods.smoothquant import search_smoothing, smoothing_scale
from tests.quantize.seen import statistics_of

SCHEME = IntScheme(8, None, symmetric=True)
STATIC, DYNAMIC = (ActivationScheme("int8", dynamic=dynamic) for dynamic in (False, True))


def loud_inputs() -> Tensor:
    """Every seventh channel is fifty times as loud."""
    torch.manual_seed(0)
    x = torch.randn(300, 96)
    x[:, ::7] *= 50
    return x


def output_error(weight: Tensor, seen: InputStatistics, scale: Tensor, inputs: ActivationScheme) -> float:
    x = seen.held_out.tokens
    activation = calibrated(inputs, seen.divided(scale))
    assert activation is not None
    rounded = rtn(weight * scale, SCHEME, torch.float32).dequantize()
    return float((activation.fake_quantize(x / scale) @ rounded.T - x @ weight.T).square().sum())


@pytest.mark.parametrize("inputs", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_the_alpha_found_loses_less_than_no_scaling_and_than_the_papers(inputs: ActivationScheme) -> None:
    seen, weights = statistics_of(loud_inputs()), [torch.randn(40, 96), torch.randn(24, 96)]
    found = search_smoothing(weights, [seen, seen], [SCHEME] * 2, [inputs] * 2, torch.float32)
    assert torch.equal(found.scale, smoothing_scale(weights, seen, found.alpha).scale)
    error, papers, none = (
        sum(output_error(weight, seen, scale, inputs) for weight in weights)
        for scale in (found.scale, smoothing_scale(weights, seen, 0.5).scale, torch.ones(96))
    )
    assert error <= papers
    assert error < 0.3 * none


def test_headroom_is_left_where_what_is_held_out_is_louder() -> None:
    x = loud_inputs()
    seen = statistics_of(x)
    doubtful = replace(seen, held_out=HeldOut(x, seen.low / 1.5, seen.high / 1.5))
    weight = torch.randn(40, 96)
    sure, careful = (
        search_smoothing([weight], [one], [SCHEME], [STATIC], torch.float32).alpha for one in (seen, doubtful)
    )
    assert careful < sure


def test_inputs_that_stay_as_they_are_leave_the_weight_to_be_judged() -> None:
    seen, weight = statistics_of(loud_inputs()), torch.randn(40, 96)
    found = search_smoothing([weight], [seen], [SCHEME], [None], torch.float32)
    lost = [
        seen.output_power(rtn(weight * scale, SCHEME, torch.float32).dequantize() / scale - weight)
        for scale in (found.scale, smoothing_scale([weight], seen, 1.0).scale)
    ]
    assert lost[0] < lost[1]


def test_powers_of_two_stay_powers_of_two() -> None:
    seen, weight = statistics_of(loud_inputs()), torch.randn(40, 96)
    found = search_smoothing([weight], [seen], [SCHEME], [STATIC], torch.float32, powers_of_two=True)
    assert torch.equal(found.scale.log2(), found.scale.log2().round())


@pytest.mark.parametrize("x", [torch.zeros(10, 96), torch.ones(1, 96)], ids=["zeros", "one token"])
def test_poor_inputs_give_a_scale_that_is_positive_and_finite(x: Tensor) -> None:
    seen = statistics_of(x)
    for tokens in (x, x[:0]):
        given = replace(seen, held_out=HeldOut(tokens, seen.low, seen.high))
        found = search_smoothing([torch.randn(8, 96)], [given], [SCHEME], [STATIC], torch.float32)
        assert bool((found.scale > 0).all())
        assert bool(found.scale.isfinite().all())
