import pytest
import torch

from qtool.core.schemes import NVFP4_ACTIVATIONS, ActivationScheme
from qtool.quantize.activations import calibrated
from tests.quantize.seen import statistics_of


@pytest.mark.parametrize(
    ("scheme", "worst"),
    [
        (ActivationScheme("int8", dynamic=False), 0.5 * 2 / 255),
        (ActivationScheme("int8", dynamic=False, symmetric=False), 0.5 * 1.25 / 255),
        (ActivationScheme("fp8", dynamic=False), 2.0**-4),  # three digits after the first
        (ActivationScheme("int8", dynamic=True), 0.5 * 2 / 255),
        (NVFP4_ACTIVATIONS, 1 / 6),  # half the step between 4 and 6
    ],
    ids=str,
)
def test_calibrated_inputs_come_back_within_half_a_step(scheme: ActivationScheme, worst: float) -> None:
    torch.manual_seed(0)
    x = torch.rand(200, 32) * 1.25 - 0.25
    x[0, 0], x[0, 1] = 1.0, -0.25
    activation = calibrated(scheme, statistics_of(x))
    assert activation is not None
    # The zero point is rounded too: half a step more at the ends.
    assert (
        float((activation.fake_quantize(x) - x).abs().max()) <= worst * (1 if scheme.symmetric else 2) * 1.01
    )


def test_inputs_of_zero_get_a_scale_that_gives_zeros_back() -> None:
    zeros = torch.zeros(5, 32)
    for scheme in (ActivationScheme("int8", dynamic=False), ActivationScheme("fp8", dynamic=False)):
        activation = calibrated(scheme, statistics_of(zeros))
        assert activation is not None
        assert torch.equal(activation.fake_quantize(zeros), zeros)


def test_a_linear_whose_inputs_are_not_rounded_needs_no_range() -> None:
    assert calibrated(None, statistics_of(torch.ones(1, 4))) is None
