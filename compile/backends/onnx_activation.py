"""Quantized activations as nodes of an ONNX graph.

Static ones are the pair QuantizeLinear and DequantizeLinear, in which runtimes look for int8 and fp8 kernels;
ONNX has no such pair for ranges taken token by token, so these are rounded in floating point.
"""

import numpy as np
from onnx import TensorProto

from qtool.compile.backends.onnx_graph import Graph, Tensor
from qtool.core.activation import FP8_MAX, Activation


def fake_quantize(graph: Graph, x: str, activation: Activation) -> str:
    """The inputs [.., K], float32, as the rounded ones that stand for them."""
    scheme = activation.scheme
    if activation.scale is not None:
        return _static(graph, x, activation.scale, activation)
    if scheme.group_size is None:
        return _dynamic(graph, x, activation)
    shape = graph.node("Shape", x)
    groups = graph.node(
        "Concat", graph.node("Shape", x, end=-1), graph.integers(-1, scheme.group_size), axis=0
    )
    rounded = _dynamic(graph, graph.node("Reshape", x, groups), activation)
    return graph.node("Reshape", rounded, shape)


def _static(graph: Graph, x: str, scale: float, activation: Activation) -> str:
    if activation.scheme.kind == "fp8":
        zero = graph.weight("zero_point", Tensor(np.zeros(1, np.uint8), TensorProto.FLOAT8E4M3FN, ()))
    else:
        zero = graph.constant(np.array(activation.zero_point, np.int8))
    parameters = (graph.constant(np.array(scale, np.float32)), zero)
    return graph.node("DequantizeLinear", graph.node("QuantizeLinear", x, *parameters), *parameters)


def _dynamic(graph: Graph, x: str, activation: Activation) -> str:
    scale, zero_point = _range(graph, x, activation)
    codes = graph.node("Add", graph.node("Div", x, scale), zero_point)
    fp8 = activation.scheme.kind == "fp8"
    low, high = (-FP8_MAX, FP8_MAX) if fp8 else (-128.0, 127.0)
    codes = graph.node("Clip", codes, _float(graph, low), _float(graph, high))
    if fp8:
        codes = graph.node(
            "Cast", graph.node("Cast", codes, to=TensorProto.FLOAT8E4M3FN), to=TensorProto.FLOAT
        )
    else:
        codes = graph.node("Round", codes)
    return graph.node("Mul", graph.node("Sub", codes, zero_point), scale)


def _range(graph: Graph, x: str, activation: Activation) -> tuple[str, str]:
    """Scale and zero point of each token, or of each of its groups: [.., 1]."""
    last, zero = graph.integers(-1), _float(graph, 0)
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
    """A token of zeros has no range: any scale gives zeros back."""
    return graph.node("Where", graph.node("Equal", scale, _float(graph, 0)), _float(graph, 1), scale)


def _float(graph: Graph, value: float) -> str:
    return graph.constant(np.array(value, np.float32))
