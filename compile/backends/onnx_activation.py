"""Quantized activations as nodes of an ONNX graph, in float32.

Where one scale serves all that a kernel sums, a product is one of codes: QuantizeLinear and DequantizeLinear
with a scale of 1 around the inputs mark them for int8 and fp8 kernels, and the inputs' scales, of each token
or of all, multiply the sums. Float32, since a sum of codes is more than float16 can hold: written in float16,
TensorRT's kernels give the bare sums out in it, which are infinite soon. Anything else is rounded in floating
point and multiplied as that.
"""

import numpy as np
import torch
from onnx import TensorProto

from qtool.compile.backends.onnx_graph import Graph, Tensor
from qtool.compile.backends.onnx_weights import floats, matrix, scales_of, stored_codes
from qtool.compile.code_products import codes_at_once
from qtool.core.activation import FP8_MAX, LEAST_BLOCK, Activation
from qtool.core.fp4 import FP4_MAX
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Linear, QuantizedTensor
from qtool.core.schemes import LinearScheme


def rounded_product(graph: Graph, x: str, linear: Linear, activation: Activation) -> str:
    """The product [.., N] of the rounded inputs [.., K] with a quantized weight, all in float32."""
    weight = linear.weight
    if isinstance(weight, torch.Tensor):
        raise AssertionError("inputs are rounded for quantized weights alone")
    size = codes_at_once(LinearScheme(weight.scheme, activation.scheme), weight.shape[1])
    if linear.order is not None and activation.scheme.group_size is not None:
        size = None  # the inputs of a group are apart once they are in order
    if size is None or isinstance(weight, Fp4Tensor):
        rounded = in_order(graph, fake_quantize(graph, x, activation), linear.order)
        return graph.node("MatMul", rounded, matrix(graph, weight, torch.float32))
    x = in_order(graph, x, linear.order)
    if size < weight.shape[1]:
        return _product_by_groups(graph, x, weight, activation, size)
    return _product_of_codes(graph, x, weight, activation)


def in_order(graph: Graph, x: str, order: torch.Tensor | None) -> str:
    """The inputs [.., K] in the order of a weight's columns."""
    return x if order is None else graph.node("Gather", x, graph.integers(*order.tolist()), axis=-1)


def _product_of_codes(
    graph: Graph, x: str, weight: QuantizedTensor | Fp8Tensor, activation: Activation
) -> str:
    right = matrix(graph, weight, torch.float32)
    if activation.scale is not None and activation.scheme.symmetric:
        codes = _marked(graph, x, activation, activation.scale)
        return graph.node("MatMul", codes, right)
    scale, zero_point = _range(graph, x, activation)
    codes = _codes(graph, x, activation, scale, zero_point)
    product = graph.node("MatMul", codes, right)
    if not activation.scheme.symmetric:
        sums = weight.dequantize(torch.float64).sum(1).float()
        product = _less_zero_points(graph, product, zero_point, sums)
    return graph.node("Mul", product, scale)


def _product_by_groups(
    graph: Graph, x: str, weight: QuantizedTensor | Fp8Tensor, activation: Activation, size: int
) -> str:
    """A product for each group of `size` inputs, all in one batch, whose sums meet after their scales."""
    out_features, in_features = weight.shape
    groups = in_features // size
    rows = graph.node("Reshape", x, graph.integers(-1, in_features))
    split = graph.node("Reshape", rows, graph.integers(-1, groups, size))
    split = graph.node("Transpose", split, perm=[1, 0, 2])  # [G, T, size]
    scale, zero_point = _range(graph, rows if activation.scheme.group_size is None else split, activation)
    codes = _codes(graph, split, activation, scale, zero_point)
    stored = stored_codes(weight)
    bare = graph.weight("codes", Tensor(stored.raw, stored.kind, (groups, size, out_features)))
    right = graph.node("DequantizeLinear", bare, _float(graph, 1))
    product = graph.node("MatMul", codes, right)
    if not activation.scheme.symmetric:
        sums = weight.codes.double().view(out_features, groups, size).sum(2).T[:, None].float()
        product = _less_zero_points(graph, product, zero_point, sums)
    factor = graph.weight("scale", floats(scales_of(weight, size)[:, None]))
    scaled = graph.node("Mul", graph.node("Mul", product, factor), scale)
    total = graph.node("ReduceSum", scaled, graph.integers(0), keepdims=0)
    shape = graph.node("Concat", graph.node("Shape", x, end=-1), graph.integers(out_features), axis=0)
    return graph.node("Reshape", total, shape)


def _less_zero_points(graph: Graph, product: str, zero_point: str, sums: torch.Tensor) -> str:
    """The part of the zero points taken off: each times the sum of its weights."""
    return graph.node("Sub", product, graph.node("Mul", zero_point, graph.weight("sums", floats(sums))))


def _codes(graph: Graph, x: str, activation: Activation, scale: str, zero_point: str) -> str:
    moved = graph.node("Div", x, scale)
    if not activation.scheme.symmetric:
        moved = graph.node("Add", moved, zero_point)
    return _marked(graph, moved, activation, 1)


def _marked(graph: Graph, x: str, activation: Activation, scale: float) -> str:
    """`x` rounded to codes and back, in the pair of nodes in which runtimes look for 8-bit kernels."""
    if activation.scheme.kind == "fp8":
        zero = graph.weight("zero_point", Tensor(np.zeros(1, np.uint8), TensorProto.FLOAT8E4M3FN, ()))
    else:
        zero = graph.constant(np.array(0, np.int8))
    parameters = (_float(graph, scale), zero)
    return graph.node("DequantizeLinear", graph.node("QuantizeLinear", x, *parameters), *parameters)


def fake_quantize(graph: Graph, x: str, activation: Activation) -> str:
    """The inputs [.., K] as the rounded ones that stand for them."""
    size = activation.scheme.group_size
    if size is None:
        return _round(graph, x, activation)
    shape = graph.node("Shape", x)
    groups = graph.node("Concat", graph.node("Shape", x, end=-1), graph.integers(-1, size), axis=0)
    rounded = _round(graph, graph.node("Reshape", x, groups), activation)
    return graph.node("Reshape", rounded, shape)


def _round(graph: Graph, x: str, activation: Activation) -> str:
    if activation.scheme.kind == "nvfp4":
        return _round_nvfp4(graph, x, activation)
    scale, zero_point = _range(graph, x, activation)
    codes = graph.node("Add", graph.node("Div", x, scale), zero_point)
    fp8 = activation.scheme.kind == "fp8"
    low, high = (-FP8_MAX, FP8_MAX) if fp8 else (-128.0, 127.0)
    codes = graph.node("Clip", codes, _float(graph, low), _float(graph, high))
    codes = _round_fp8(graph, codes) if fp8 else graph.node("Round", codes)
    return graph.node("Mul", graph.node("Sub", codes, zero_point), scale)


def _round_nvfp4(graph: Graph, x: str, activation: Activation) -> str:
    """e2m1 has steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6; halves go to the even multiple of a step."""
    assert activation.scale is not None
    factor = _float(graph, 1 / activation.scale)
    largest = graph.node("ReduceMax", graph.node("Abs", x), graph.integers(-1), keepdims=1)
    block = graph.node("Mul", factor, graph.node("Div", largest, _float(graph, FP4_MAX)))
    block = _round_fp8(graph, graph.node("Min", block, _float(graph, FP8_MAX)))
    none = graph.node("Equal", block, _float(graph, 0))
    scale = graph.node("Div", graph.node("Where", none, _float(graph, LEAST_BLOCK), block), factor)
    codes = graph.node("Clip", graph.node("Div", x, scale), _float(graph, -FP4_MAX), _float(graph, FP4_MAX))
    size, step = graph.node("Abs", codes), _float(graph, 2)
    for bound, finer in ((4, 1.0), (2, 0.5)):
        step = graph.node("Where", graph.node("Less", size, _float(graph, bound)), _float(graph, finer), step)
    codes = graph.node("Mul", graph.node("Round", graph.node("Div", codes, step)), step)
    return graph.node("Mul", codes, scale)


def _round_fp8(graph: Graph, x: str) -> str:
    return graph.node("Cast", graph.node("Cast", x, to=TensorProto.FLOAT8E4M3FN), to=TensorProto.FLOAT)


def _range(graph: Graph, x: str, activation: Activation) -> tuple[str, str]:
    """Scale and zero point: of everything, of each token, or of each of its groups: [.., 1]."""
    last, zero = graph.integers(-1), _float(graph, 0)
    if activation.scale is not None:
        return _float(graph, activation.scale), _float(graph, activation.zero_point)
    if activation.scheme.symmetric:
        half = FP8_MAX if activation.scheme.kind == "fp8" else 127.5
        largest = graph.node("ReduceMax", graph.node("Abs", x), last, keepdims=1)
        return _positive(graph, graph.node("Div", largest, _float(graph, half))), zero
    low = graph.node("Min", graph.node("ReduceMin", x, last, keepdims=1), zero)
    high = graph.node("Max", graph.node("ReduceMax", x, last, keepdims=1), zero)
    scale = _positive(graph, graph.node("Div", graph.node("Sub", high, low), _float(graph, 255)))
    place = graph.node("Sub", _float(graph, -128), graph.node("Div", low, scale))
    return scale, graph.node("Round", graph.node("Clip", place, _float(graph, -128), _float(graph, 127)))


def _positive(graph: Graph, scale: str) -> str:
    """A token of zeros has no range: any scale gives zeros back, a small one without the sums' rounding."""
    least = _float(graph, float(np.finfo(np.float32).eps))
    return graph.node("Where", graph.node("Equal", scale, _float(graph, 0)), least, scale)


def _float(graph: Graph, value: float) -> str:
    return graph.constant(np.array(value, np.float32))
