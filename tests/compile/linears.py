"""Single linears of every scheme, and what the reference makes of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from qtool.compile.backends.onnx import Onnx, Rows
from qtool.compile.backends.onnx_graph import Graph
from qtool.compile.backends.onnx_tensorrt import TensorRtOnnx
from qtool.compile.backends.reference import Dense, Tokens
from qtool.compile.decoder import Weights
from qtool.core.activation import Activation
from qtool.core.qtensor import Linear, Quantized
from qtool.core.schemes import (
    NVFP4_ACTIVATIONS,
    ActivationScheme,
    Fp4Scheme,
    Fp8Scheme,
    IntScheme,
    LinearScheme,
    WeightScheme,
)
from qtool.quantize.methods.floats import (
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    shared_nvfp4_scale,
)
from tests.compile.checkpoints import round_to

INT8, FP8 = ActivationScheme("int8", dynamic=True), ActivationScheme("fp8", dynamic=True)
STATIC_INT8, STATIC_FP8 = (
    ActivationScheme("int8", dynamic=False),
    ActivationScheme("fp8", dynamic=False),
)
ASYMMETRIC, STATIC_ASYMMETRIC = (
    ActivationScheme("int8", dynamic=dynamic, symmetric=False) for dynamic in (True, False)
)
GROUPS = {kind: ActivationScheme(kind, dynamic=True, group_size=32) for kind in ("int8", "fp8")}

WEIGHTS: list[WeightScheme] = [
    *(
        IntScheme(bits, size, symmetric)
        for bits in range(2, 9)
        for size in (32, None)
        for symmetric in (True, False)
    ),
    *(Fp8Scheme(*shape) for shape in ((None, None), (1, None), (1, 32), (128, 128), (48, 64))),
    Fp4Scheme("nvfp4"),
    Fp4Scheme("mxfp4"),
]
BY_CODES: list[LinearScheme] = [
    *(
        LinearScheme(IntScheme(8, None, symmetric), activation)
        for symmetric in (True, False)
        for activation in (INT8, STATIC_INT8, ASYMMETRIC, STATIC_ASYMMETRIC)
    ),
    LinearScheme(IntScheme(6, None, True), INT8),
    *(
        LinearScheme(IntScheme(8, 32, True), activation)
        for activation in (INT8, STATIC_INT8, ASYMMETRIC, STATIC_ASYMMETRIC, GROUPS["int8"])
    ),
    *(
        LinearScheme(weight, activation)
        for weight in (Fp8Scheme(None, None), Fp8Scheme(1, None), Fp8Scheme(128, 128), Fp8Scheme(48, 32))
        for activation in (FP8, STATIC_FP8, GROUPS["fp8"])
    ),
]
"""Schemes that kernels multiply as codes."""
NVFP4 = LinearScheme(Fp4Scheme("nvfp4"), NVFP4_ACTIVATIONS)
ROUNDED: list[LinearScheme] = [
    LinearScheme(IntScheme(4, 32, True), INT8),
    LinearScheme(IntScheme(4, 32, False), GROUPS["int8"]),
    LinearScheme(IntScheme(8, 32, False), ASYMMETRIC),
    LinearScheme(IntScheme(8, 16, True), GROUPS["int8"]),
    LinearScheme(Fp8Scheme(1, None), INT8),
    LinearScheme(Fp4Scheme("nvfp4"), FP8),
    LinearScheme(Fp4Scheme("mxfp4"), NVFP4_ACTIVATIONS),
]
"""Schemes whose inputs are rounded, but not for a kernel's sake."""


def linear_of(
    scheme: LinearScheme, out_features: int, in_features: int, *, bias: bool = True, seed: int = 0
) -> Linear:
    """A seeded linear, rounded to nearest. Static ranges are too narrow for some inputs."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(out_features, in_features, generator=generator) * 0.1
    activation = scheme.activation
    rounding = None
    if activation is not None:
        static = {"fp8": 0.004, "int8": 0.02, "nvfp4": 0.0013}[activation.kind]
        scale = None if activation.dynamic and activation.kind != "nvfp4" else static
        moved = not activation.dynamic and not activation.symmetric
        rounding = Activation(activation, scale, -37 if moved else 0)
    return Linear(
        quantized(dense, scheme.weight),
        torch.randn(out_features, generator=generator) if bias else None,
        activation=rounding,
    )


def quantized(dense: Tensor, scheme: WeightScheme) -> Quantized:
    """A weight rounded to nearest."""
    if isinstance(scheme, IntScheme):
        return round_to(dense, scheme, torch.float32)
    if isinstance(scheme, Fp8Scheme):
        return quantize_fp8(dense, scheme, torch.float32)
    if scheme.kind == "mxfp4":
        return quantize_mxfp4(dense)
    return quantize_nvfp4(dense, shared_nvfp4_scale([dense]) * 1.37)


def inputs(rows: int, in_features: int) -> Tensor:
    """Seeded inputs, a token of zeros among them, and one whose inputs are all positive."""
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(1))
    x[rows // 2] = 0
    x[-1] = x[-1].abs()
    return x


def reference(x: Tensor, linear: Linear) -> Tensor:
    """What the reference backend makes of it: the truth."""
    none = torch.zeros(0, dtype=torch.int64)
    return Dense(Tokens(none, none, none, none)).linears(x, [linear])[0]


def write_linear(linear: Linear, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The linear as an ONNX graph from x [B, S, K] to y [B, S, N]."""
    return write_linears([linear], folder, dtype)


def write_linears(linears: Sequence[Linear], folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Linears over one x, each a product of its own; y, y.1, y.2 and so on. In float16: TensorRT's graph."""
    in_features, kind = linears[0].weight.shape[1], TensorProto.FLOAT
    if dtype == torch.float16:
        kind = TensorProto.FLOAT16
    with (folder / "g.data").open("wb") as data:
        graph = Graph(data, "g.data")
        operations = (TensorRtOnnx if dtype == torch.float16 else Onnx)(graph, dtype, 32)
        x = graph.input("x", kind, ["B", "S", in_features])
        found = [operations.linears(Rows(x, in_features), [linear])[0] for linear in linears]
    for index, rows in enumerate(found):
        graph.output(f"y.{index}" if index else "y", rows.name, kind, ["B", "S", rows.features])
    model = graph.model("linear")
    unused = [value for value in model.graph.input if value.name != "x"]
    for value in unused:
        model.graph.input.remove(value)
    onnx.save(model, folder / "g.onnx")
    onnx.checker.check_model(folder / "g.onnx", full_check=dtype == torch.float32)
    return folder / "g.onnx"


class Requantized:
    """`source` with linears rounded as `schemes` says, by a part of their name."""

    def __init__(self, source: Weights, schemes: dict[str, LinearScheme]) -> None:
        self._source, self._schemes = source, schemes

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def linear(self, module: str) -> Linear:
        linear = self._source.linear(module)
        scheme = next((scheme for part, scheme in self._schemes.items() if part in module), None)
        if scheme is None:
            return linear
        rounded = linear_of(scheme, 1, 96).activation
        return replace(linear, weight=quantized(linear.dense(), scheme.weight), activation=rounded)
