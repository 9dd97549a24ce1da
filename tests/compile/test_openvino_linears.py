"""Linears of every scheme in OpenVINO graphs: the numbers of the reference, and how the plugin holds them."""

import openvino as ov
import pytest
import torch
from openvino import opset13 as ops

from qtool.compile.backends.openvino import OpenVino
from qtool.compile.stack import stack
from qtool.core.qtensor import Linear
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme, WeightScheme
from tests.compile.linears import BY_CODES, GROUPS, NVFP4, ROUNDED, WEIGHTS, inputs, linear_of, reference

BOUND = 1e-5
"""Of the largest output: float32 sums in another order."""


def compiled(linear: Linear) -> ov.CompiledModel:
    """As the driver compiles a graph: nothing rounded on its own."""
    x = ops.parameter([-1, linear.weight.shape[1]], ov.Type.f32)
    model = ov.Model(OpenVino().linears(x.output(0), [linear]), [x])
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    return ov.Core().compile_model(model, "CPU", exact | {"INFERENCE_NUM_THREADS": 1})


def difference(linear: Linear, x: torch.Tensor, wanted: torch.Tensor) -> float:
    found = torch.from_numpy(compiled(linear)(x.numpy())[0])
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("scheme", WEIGHTS, ids=str)
def test_weights_of_every_format_are_the_same_numbers(scheme: WeightScheme, rows: int) -> None:
    linear, x = linear_of(LinearScheme(scheme), 37, 96), inputs(rows + 1, 96)
    assert difference(linear, x, reference(x, linear)) < BOUND


@pytest.mark.parametrize("scheme", [*BY_CODES, NVFP4, *ROUNDED], ids=str)
def test_rounded_inputs_are_rounded_alike(scheme: LinearScheme) -> None:
    """All but those between two codes, where the plugin's division may differ in its last bit.

    The largest of an int8 group or token is 127.5 steps: between two codes.
    """
    linear, x = linear_of(scheme, 37, 96), inputs(9, 96)
    found, wanted = torch.from_numpy(compiled(linear)(x.numpy())[0]), reference(x, linear)
    rows = (found - wanted).abs().amax(1) / wanted.abs().max()
    between = scheme.activation == GROUPS["int8"]
    assert rows.median() < (4e-3 if between else BOUND)
    assert rows.max() < 0.05


def test_linears_with_global_scales_of_their_own_become_one() -> None:
    linears = [linear_of(LinearScheme(Fp4Scheme("nvfp4")), size, 96, seed=size) for size in (37, 5)]
    x = inputs(5, 96)
    wanted = torch.cat([reference(x, linear) for linear in linears], 1)
    assert difference(stack(linears), x, wanted) < BOUND


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (Fp4Scheme("nvfp4"), "f4e2m1"),
        (Fp4Scheme("mxfp4"), "f4e2m1"),
        (IntScheme(3, 32, True), "i4"),
        (IntScheme(6, None, False), "u8"),
        (Fp8Scheme(1, None), "f32"),
    ],
    ids=str,
)
def test_codes_are_multiplied_as_they_are_stored_but_for_fp8(scheme: WeightScheme, kind: str) -> None:
    graph = compiled(linear_of(LinearScheme(scheme), 64, 96)).get_runtime_model()
    products = [n for n in graph.get_ops() if n.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    assert [n.input(1).get_element_type().get_type_name() for n in products] == [kind]
