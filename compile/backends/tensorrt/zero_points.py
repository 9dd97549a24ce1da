"""Asymmetric weights without zero points: TensorRT's int4 has none.

Three exact ways were built with tensorrt_rtx 1.7.1 (two layers of SmolLM2, groups of 64). Below are the bytes
that one weight of the MLP costs in the plan, and those that a decode step moves for it:

====================================  =====  ======
symmetric, for comparison             0.531   0.531
correction by group means (taken)     0.562   0.562
subtracted from the weights           0.562   4.562
code minus zero point in int8         1.031   5.031
====================================  =====  ======

The last two are not fused: every step writes the weights out in 16 bits and reads them back. The correction
is one more product, with 1 / group_size of the arithmetic, fused with the subtraction that follows it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from qtool.errors import QtoolError

_SIGNED: dict[int, TensorProto.DataType] = {
    TensorProto.UINT4: TensorProto.INT4,
    TensorProto.UINT8: TensorProto.INT8,
}
_SIGN_BITS: dict[int, int] = {TensorProto.UINT4: 0x88, TensorProto.UINT8: 0x80}
"""Flipping the highest bit of an unsigned code gives the signed code that is 2^(bits - 1) less."""
_OFFSET: dict[int, int] = {TensorProto.UINT4: 8, TensorProto.UINT8: 128}


def fold_zero_points(model: Path) -> int:
    """Rewrite an ONNX file in place so that no weight has a zero point; returns how many had.

    With codes c and zero points z, both less 2^(bits - 1), a linear is

        y = x · (s c)ᵀ − mean over each group of x · (g s z)ᵀ,

    g inputs a group. The mean, not the sum, so that a float16 graph cannot overflow. The codes are rewritten
    where they lie, without a second copy of the weights.
    """
    proto = onnx.load(model, load_external_data=False)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    folds = {
        node.output[0]: node
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear" and len(node.input) > 2 and node.input[0] in weights
    }
    if not folds:
        return 0
    ranks = _ranks(proto)
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    for node in nodes:
        weight = next((name for name in node.input if name in folds), None)
        if weight is None:
            proto.graph.node.append(node)
            continue
        if node.op_type != "MatMul" or node.input[1] != weight:
            raise QtoolError(f"{model}: {weight}, with zero points, feeds {node.op_type}; wanted a MatMul")
        added, tensors = _correction(node, folds[weight], weights, ranks[node.input[0]], model.parent)
        proto.graph.node.extend([node, *added])
        proto.graph.initializer.extend(tensors)
    for node in folds.values():
        _make_signed(weights[node.input[0]], model.parent)
    unused = {node.input[2] for node in folds.values()}
    for node in proto.graph.node:
        if node.output[0] in folds:
            del node.input[2]
    kept = [tensor for tensor in proto.graph.initializer if tensor.name not in unused]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    onnx.save(proto, model)
    return len(folds)


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    graph = onnx.shape_inference.infer_shapes(proto).graph
    values = (*graph.input, *graph.value_info)
    return {value.name: len(value.type.tensor_type.shape.dim) for value in values}


def _correction(
    product: onnx.NodeProto,
    dequantize: onnx.NodeProto,
    weights: dict[str, onnx.TensorProto],
    rank: int,
    folder: Path,
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """What subtracts the zero points' part from `product`, whose output it takes over."""
    codes, scale, zero_point = (weights[name] for name in dequantize.input)
    in_features = codes.dims[0]
    scales = np.atleast_2d(numpy_helper.to_array(scale, str(folder)))
    zeros = np.atleast_2d(numpy_helper.to_array(zero_point, str(folder))).astype(np.int16)
    groups = len(scales)
    per_group = in_features // groups
    factor = scales.astype(np.float32) * (zeros - _OFFSET[zero_point.data_type]) * per_group
    name, output = dequantize.output[0], product.output[0]
    product.output[0] = f"{output}.codes"
    shape = np.array([*[0] * (rank - 1), groups, per_group], np.int64)
    tensors = [
        numpy_helper.from_array(factor.astype(scales.dtype), f"{name}.zero"),
        numpy_helper.from_array(shape, f"{name}.groups"),
        numpy_helper.from_array(np.array([-1], np.int64), f"{name}.axis"),
    ]
    nodes = [
        _node("Reshape", [product.input[0], f"{name}.groups"], f"{name}.grouped"),
        _node("ReduceMean", [f"{name}.grouped", f"{name}.axis"], f"{name}.means", keepdims=0),
        _node("MatMul", [f"{name}.means", f"{name}.zero"], f"{name}.correction"),
        _node("Sub", [product.output[0], f"{name}.correction"], output),
    ]
    return nodes, tensors


def _node(operator: str, inputs: Sequence[str], output: str, **attributes: int) -> onnx.NodeProto:
    node = helper.make_node(operator, inputs, [output], name=output)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node


def _make_signed(codes: onnx.TensorProto, folder: Path) -> None:
    """Make unsigned codes signed ones, where they are stored."""
    flip = _SIGN_BITS[codes.data_type]
    if codes.data_location == TensorProto.EXTERNAL:
        place = external_data_helper.ExternalDataInfo(codes)
        stored: NDArray[np.uint8] = np.memmap(
            folder / place.location, np.uint8, "r+", offset=place.offset or 0, shape=(place.length or 0,)
        )
        stored ^= flip
    else:
        codes.raw_data = (np.frombuffer(codes.raw_data, np.uint8) ^ np.uint8(flip)).tobytes()
    codes.data_type = _SIGNED[codes.data_type]
