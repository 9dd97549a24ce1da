"""The ONNX graph with an operator of TensorRT's own, which rounds inputs to nvfp4: ONNX itself has none."""

import numpy as np
import torch
from onnx import TensorProto

from qtool.compile.backends.onnx import Onnx
from qtool.compile.backends.onnx_graph import Graph, Tensor
from qtool.compile.backends.onnx_weights import floats
from qtool.compile.codes import pack4
from qtool.core.activation import Activation
from qtool.core.qtensor import Fp4Tensor, Linear
from qtool.core.schemes import NVFP4_ACTIVATIONS

DOMAIN = "trt"
ROUND_NVFP4 = "TRT_FP4DynamicQuantize"
_BLOCK = 16


class TensorRtOnnx(Onnx):
    """`Onnx` whose products of nvfp4 inputs and nvfp4 weights are those of their codes."""

    def _rounded_product(self, x: str, linear: Linear, activation: Activation) -> str:
        weight = linear.weight
        if activation.scheme != NVFP4_ACTIVATIONS or not isinstance(weight, Fp4Tensor):
            return super()._rounded_product(x, linear, activation)
        return _product(self._graph, x, weight, activation)


def _product(graph: Graph, x: str, weight: Fp4Tensor, activation: Activation) -> str:
    """[.., N] in float32. The weight's global scales, which stacked rows have each their own, come last."""
    out_features, in_features = weight.shape
    rows = graph.node("Reshape", x, graph.integers(-1, in_features))
    factor = graph.constant(np.array(activation.scale, np.float32))
    options = {"axis": -1, "block_size": _BLOCK, "scale_type": int(TensorProto.FLOAT8E4M3FN)}
    codes, blocks = graph.nodes(f"{DOMAIN}::{ROUND_NVFP4}", [rows, factor], 2, **options)
    graph.declare(codes, TensorProto.FLOAT4E2M1, ["T", in_features])
    graph.declare(blocks, TensorProto.FLOAT8E4M3FN, ["T", in_features // _BLOCK])
    scales = graph.node("DequantizeLinear", blocks, factor)
    left = graph.node("DequantizeLinear", codes, scales, axis=1, block_size=_BLOCK)
    product = graph.node("MatMul", left, _matrix(graph, weight))
    if weight.global_scale is not None:
        own = graph.weight("scale", floats(weight.global_scale.float()))
        product = graph.node("Mul", product, own)
    shape = graph.node("Concat", graph.node("Shape", x, end=-1), graph.integers(out_features), axis=0)
    return graph.node("Reshape", product, shape)


def _matrix(graph: Graph, weight: Fp4Tensor) -> str:
    """The weight [K, N] but for its global scales: fp4 codes under fp8 scales."""
    raw = weight.scale.T.contiguous().view(torch.uint8).numpy().reshape(-1)
    blocks = graph.weight("scale", Tensor(raw, TensorProto.FLOAT8E4M3FN, weight.scale.T.shape))
    scales = graph.node("DequantizeLinear", blocks, graph.constant(np.array(1, np.float32)))
    packed = pack4(weight.codes.T.contiguous().numpy().reshape(-1))
    codes = graph.weight("codes", Tensor(packed, TensorProto.FLOAT4E2M1, weight.codes.T.shape))
    return graph.node("DequantizeLinear", codes, scales, axis=0, block_size=_BLOCK)
