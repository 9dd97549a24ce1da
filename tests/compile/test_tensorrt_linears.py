"""Linears of every scheme as TensorRT takes them: what its parser makes of them, what its builder chooses."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from qtool.compile.abilities import Abilities
from qtool.compile.backends.tensorrt.checks import read_graph
from qtool.compile.backends.tensorrt.info import Layer
from qtool.compile.backends.tensorrt.inspector import check_holds, count_unpacked, inspect
from qtool.compile.backends.tensorrt.process import run_build
from qtool.compile.backends.tensorrt.weights import PairedFp4, SplitChannels
from qtool.compile.backends.tensorrt.worker import BuildSpec
from qtool.compile.backends.tensorrt.zero_points import fold_zero_points
from qtool.compile.stack import stack
from qtool.core.qtensor import Linear
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme, WeightScheme
from tests.compile.linears import (
    BY_CODES,
    FP8,
    GROUPS,
    INT8,
    NVFP4,
    ROUNDED,
    STATIC_ASYMMETRIC,
    STATIC_INT8,
    WEIGHTS,
    inputs,
    linear_of,
    reference,
    write_linear,
    write_linears,
)

pytest.importorskip("tensorrt_rtx_bindings")
from tests.compile.tensorrt_interpreter import Interpreter

CAN = Abilities(only_codes=True)


@dataclass(frozen=True)
class One:
    """Weights that are one linear."""

    only: Linear

    def tensor(self, name: str) -> torch.Tensor:
        raise KeyError(name)

    def linear(self, module: str) -> Linear:
        return self.only


def as_taken(linear: Linear) -> Linear:
    return SplitChannels(PairedFp4(One(linear))).linear("")


def parsed(linear: Linear, folder: Path, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the network computes that the parser makes of the float16 graph."""
    model = write_linear(as_taken(linear), folder, torch.float16)
    fold_zero_points(model)
    read_graph(model)
    return Interpreter(model, dtype).run({"x": x[None].half()})["y"][0].float()


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("scheme", [*BY_CODES, NVFP4], ids=str)
def test_products_of_codes_are_parsed_as_they_are(scheme: LinearScheme, tmp_path: Path) -> None:
    """In float32 whatever the graph computes in, but for the inputs and the result."""
    assert CAN.refusal(scheme) is None
    linear, x = linear_of(scheme, 40, 96, bias=False), inputs(7, 96).half().float()
    wanted = reference(x, linear)
    assert difference(parsed(linear, tmp_path, x, torch.float32), wanted) < 1e-5
    found = parsed(linear, tmp_path, x, torch.float16)
    torch.testing.assert_close(found, wanted, rtol=2**-11, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("scheme", WEIGHTS, ids=str)
def test_weights_of_every_format_are_parsed_as_they_are(scheme: WeightScheme, tmp_path: Path) -> None:
    linear, x = linear_of(LinearScheme(scheme), 40, 96), inputs(5, 96).half().float()
    wanted = reference(x, linear)
    # scales and zero points' factors are numbers of 11 bits; with few codes a zero point is most of a weight
    assert difference(parsed(linear, tmp_path, x, torch.float32), wanted) < 2e-3
    assert difference(parsed(linear, tmp_path, x, torch.float16), wanted) < 4e-3


@pytest.mark.parametrize("scheme", ROUNDED, ids=str)
def test_what_no_kernel_multiplies_is_refused_with_what_they_do(scheme: LinearScheme) -> None:
    assert "it multiplies rounded inputs by weights of their own kind alone" in str(CAN.refusal(scheme))


def built(folder: Path, linears: list[Linear], capability: int = 89) -> list[Layer]:
    """The plan's layers; it holds what the graph does, or this raises."""
    model = write_linears([as_taken(linear) for linear in linears], folder, torch.float16)
    fold_zero_points(model)
    facts = read_graph(model)
    shapes = tuple((batch, 3, linears[0].weight.shape[1]) for batch in (1, 4, 8))
    spec = BuildSpec(
        target="tensorrt-rtx",
        model=model,
        plan=folder / "plan",
        log=folder / "log",
        compute_capabilities=(capability,),
        profiles=({"x": shapes},),
    )
    inspection = inspect(run_build(spec, lambda phase, share: None))
    check_holds(inspection, facts, 1)
    assert count_unpacked(inspection) == 0
    return list(inspection.layers)


def multiplied(layers: list[Layer]) -> set[tuple[str, str, str]]:
    """What is multiplied by what, into what."""
    return {
        (read.dtype, constant.dtype, layer.outputs[0].dtype)
        for layer in layers
        for read in layer.inputs[:1]
        for constant in layer.constants
        if len(constant.shape) > 1 and constant.dtype in ("Int4", "Int8", "FP8", "FP4E2M1")
    }


@pytest.mark.parametrize("capability", [80, 120])
def test_int8_codes_are_multiplied_by_int8_kernels(capability: int, tmp_path: Path) -> None:
    weights = [IntScheme(8, None, True), IntScheme(8, 32, True), IntScheme(8, None, False)]
    schemes = [LinearScheme(weight, INT8) for weight in weights]
    schemes += [LinearScheme(weights[0], activation) for activation in (STATIC_INT8, STATIC_ASYMMETRIC)]
    layers = built(tmp_path, [linear_of(scheme, 160, 96) for scheme in schemes], capability)
    assert multiplied(layers) == {("Int8", "Int8", "Float")}


@pytest.mark.parametrize("capability", [89, 120])
def test_fp8_codes_are_multiplied_by_fp8_kernels(capability: int, tmp_path: Path) -> None:
    schemes = [
        LinearScheme(Fp8Scheme(1, None), FP8),
        LinearScheme(Fp8Scheme(None, None), FP8),
        LinearScheme(Fp8Scheme(128, 32), GROUPS["fp8"]),
    ]
    layers = built(tmp_path, [linear_of(scheme, 160, 96) for scheme in schemes], capability)
    assert multiplied(layers) == {("FP8", "FP8", "Float")}


def test_nvfp4_codes_are_multiplied_by_nvfp4_kernels(tmp_path: Path) -> None:
    layers = built(tmp_path, [stack([linear_of(NVFP4, 96, 96, seed=seed) for seed in range(2)])], 120)
    assert multiplied(layers) == {("FP4E2M1", kind, "Float") for kind in ("FP4E2M1", "FP8")}  # and scales


def test_weights_alone_are_multiplied_packed(tmp_path: Path) -> None:
    formats = [IntScheme(3, 32, True), IntScheme(6, None, True), Fp8Scheme(1, None)]
    formats += [Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")]
    layers = built(tmp_path, [linear_of(LinearScheme(scheme), 160, 96) for scheme in formats])
    assert multiplied(layers) == {("Half", kind, "Half") for kind in ("Int4", "Int8", "FP8")}
