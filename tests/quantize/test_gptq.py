import logging

import pytest
import torch
from torch import Tensor

from qtool.calibrate.statistics import HeldOut, InputStatistics
from qtool.core.recipe import Gptq
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme, WeightScheme
from qtool.quantize.methods.gptq import gptq, inverse_factor
from qtool.quantize.methods.rtn import rtn

SCHEMES = [
    IntScheme(4, 32, symmetric=False),
    IntScheme(4, 32, symmetric=True),
    IntScheme(8, None, symmetric=True),
    Fp8Scheme(1, None),
    Fp8Scheme(4, 40),
    Fp4Scheme("nvfp4"),
    Fp4Scheme("mxfp4"),
]


def statistics_of(moment: Tensor, tokens: int = 1_000_000) -> InputStatistics:
    magnitude = moment.diagonal().sqrt()
    none = HeldOut(torch.empty(0, len(moment)), -magnitude, magnitude)
    return InputStatistics(moment, magnitude, -magnitude, magnitude, tokens, none)


def correlated() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(1000, 96) @ torch.randn(96, 96) / 10
    return x.T @ x / len(x)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("activation_order", [True, False])
def test_it_is_rounding_to_nearest_when_inputs_are_uncorrelated(
    scheme: WeightScheme, activation_order: bool
) -> None:
    torch.manual_seed(1)
    weight = torch.randn(11, 96)
    options = Gptq(activation_order=activation_order, search_range=False, sweeps=0)
    found = gptq(weight, statistics_of(torch.eye(96)), scheme, options, torch.float16)
    nearest = rtn(weight, scheme, torch.float16)
    assert torch.equal(found.dequantize(), nearest.dequantize())
    assert found.scheme == scheme


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(
    "options", [Gptq(), Gptq(activation_order=False), Gptq(search_range=False, sweeps=0)], ids=str
)
def test_its_output_error_is_well_below_rounding_for_correlated_inputs(
    scheme: WeightScheme, options: Gptq
) -> None:
    torch.manual_seed(1)
    weight, seen = torch.randn(11, 96), statistics_of(correlated())
    found = gptq(weight, seen, scheme, options, torch.float16)
    nearest = rtn(weight, scheme, torch.float16)
    errors = [seen.output_power(one.dequantize() - weight) for one in (found, nearest)]
    assert errors[0] < 0.6 * errors[1]


def test_it_does_not_fit_the_noise_of_few_tokens() -> None:
    torch.manual_seed(1)
    weight, mixing = torch.randn(40, 96), torch.randn(96, 96) / 10
    x = torch.randn(150, 96) @ mixing
    moment, truth = x.T @ x / len(x), statistics_of(mixing.T @ mixing)
    trusting, wary = (
        gptq(weight, statistics_of(moment, tokens), SCHEMES[0], Gptq(), torch.float16)
        for tokens in (1_000_000, 150)
    )
    assert statistics_of(moment).output_power(trusting.dequantize() - weight) < statistics_of(
        moment
    ).output_power(wary.dequantize() - weight)
    lost = [truth.output_power(one.dequantize() - weight) for one in (trusting, wary)]
    assert lost[1] < lost[0]


def test_the_block_size_changes_the_order_of_the_sums_and_nothing_else() -> None:
    torch.manual_seed(1)
    weight, seen = torch.randn(11, 96), statistics_of(correlated())
    one, other = (
        gptq(weight, seen, SCHEMES[0], Gptq(block_size=size, sweeps=0), torch.float16).dequantize()
        for size in (7, 96)
    )
    # A sum in another order may tip a value that lies between two codes; such values are few.
    assert float((one != other).float().mean()) < 0.01


def test_a_dead_channel_is_rounded_to_nearest_and_disturbs_no_other() -> None:
    torch.manual_seed(1)
    weight, moment = torch.randn(11, 96), correlated()
    moment[5], moment[:, 5] = 0, 0
    options = Gptq(search_range=False, sweeps=0)
    found = gptq(weight, statistics_of(moment), SCHEMES[0], options, torch.float16)
    nearest = rtn(weight, SCHEMES[0], torch.float16)
    assert torch.equal(found.codes[:, 5], nearest.codes[:, 5])
    errors = [statistics_of(moment).output_power(one.dequantize() - weight) for one in (found, nearest)]
    assert errors[0] < 0.6 * errors[1]


def test_inputs_of_zero_are_rounded_to_nearest() -> None:
    torch.manual_seed(1)
    weight, options = torch.randn(3, 32), Gptq(search_range=False, sweeps=0)
    found = gptq(weight, statistics_of(torch.zeros(32, 32)), SCHEMES[0], options, torch.float16)
    assert torch.equal(found.codes, rtn(weight, SCHEMES[0], torch.float16).codes)


def test_a_singular_hessian_gets_more_damping_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    direction = torch.arange(1.0, 65.0)
    with caplog.at_level(logging.WARNING):
        _, factor = inverse_factor(direction[:, None] * direction, damping=1e-9)
    assert bool(factor.isfinite().all())
    assert "the Hessian is singular at damping 1e-09" in caplog.text


def test_the_factor_is_the_inverse_s_upper_cholesky() -> None:
    moment = correlated().double()
    _, factor = inverse_factor(moment.clone(), damping=0.1)
    damped = moment + 0.1 * moment.diagonal().mean() * torch.eye(96)
    assert torch.equal(factor, factor.triu())
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(96, dtype=torch.float64), atol=1e-8)
