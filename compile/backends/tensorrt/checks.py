"""What a graph must not hold, looked for before a builder sees it."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto

from qtool.compile.backends.onnx_tensorrt import DOMAIN
from qtool.errors import QtoolError

_INT4 = {TensorProto.INT4, TensorProto.UINT4}
_MULTIPLIED: dict[int, str] = {
    TensorProto.INT8: "Int8",
    TensorProto.FLOAT8E4M3FN: "FP8",
    TensorProto.FLOAT4E2M1: "FP4E2M1",
}
"""Types of codes that kernels multiply by codes, as TensorRT writes them."""
_PASSIVE = {"Reshape", "Transpose", "Cast", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Gather"}
"""Operators that hand on the values of their first input."""


@dataclass(frozen=True)
class GraphFacts:
    """What a plan built from a graph has to hold."""

    weight_bytes: int
    """Of all constants, each counted once."""
    int4_codes: int
    """Weights stored in 4 bits."""
    int4_blocks: frozenset[int]
    """How many of them share a scale."""
    inputs: dict[str, tuple[int | str, ...]]
    """Dimensions of each input, a name where a call chooses."""
    multiplied_codes: dict[str, int] = field(default_factory=dict)
    """Weights that are to be multiplied by codes of their own type, by that type."""
    products_of_codes: int = 0
    """How many products these are in."""


def read_graph(model: Path, *, plugins: bool = False) -> GraphFacts:
    """Check an ONNX file and say what a plan built from it has to hold.

    Raises QtoolError with the reason for what the builder of tensorrt_rtx 1.7.1 gets wrong or dies of: nodes
    of plugins, unless these are asked for, zero points, and weights in groups under 8-bit activations.
    """
    proto = onnx.load(model, load_external_data=False)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    makers = {output: node for node in proto.graph.node for output in node.output}
    sizes: Counter[int] = Counter()
    multiplied: list[tuple[str, int]] = []
    for node in proto.graph.node:
        if node.domain not in ("", "ai.onnx", DOMAIN) and not plugins:
            raise QtoolError(
                f"{model}: node {node.name or node.output[0]} ({node.domain}.{node.op_type}) is a plugin's; "
                "a graph built without a GPU may hold ONNX's own operators alone"
            )
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors:
            _refuse_zero_points(model, node)
            codes = tensors[node.input[0]]
            if codes.data_type in _INT4:
                sizes[_block(codes, tensors[node.input[1]])] += math.prod(codes.dims)
        if node.op_type in ("MatMul", "Gemm"):
            codes = _codes_under_codes(model, node, makers, tensors)
            if codes is not None:
                multiplied.append((_MULTIPLIED[codes.data_type], math.prod(codes.dims)))
    return GraphFacts(
        weight_bytes=sum(_bytes(tensor) for tensor in proto.graph.initializer),
        int4_codes=sizes.total(),
        int4_blocks=frozenset(sizes),
        multiplied_codes={dtype: sum(n for d, n in multiplied if d == dtype) for dtype, _ in multiplied},
        products_of_codes=len(multiplied),
        inputs={
            value.name: tuple(
                dimension.dim_param or dimension.dim_value for dimension in value.type.tensor_type.shape.dim
            )
            for value in proto.graph.input
        },
    )


def _block(codes: onnx.TensorProto, scale: onnx.TensorProto) -> int:
    return int(math.prod(codes.dims) // max(math.prod(scale.dims), 1))


def _bytes(tensor: onnx.TensorProto) -> int:
    for entry in tensor.external_data:
        if entry.key == "length":
            return int(entry.value)
    return len(tensor.raw_data)


def _refuse_zero_points(model: Path, node: onnx.NodeProto) -> None:
    if len(node.input) > 2 and node.input[2]:
        raise QtoolError(
            f"{model}: the weight {node.input[0]} has zero points, which TensorRT's int4 and int8 do not; "
            "fold them in (zero_points: exact) or allow rounding again (zero_points: requantize)"
        )


def _codes_under_codes(
    model: Path,
    product: onnx.NodeProto,
    makers: dict[str, onnx.NodeProto],
    tensors: dict[str, onnx.TensorProto],
) -> onnx.TensorProto | None:
    """The codes of a weight whose inputs are quantized, if that is what `product` multiplies.

    In groups such a pair builds without a word, and the plan then applies the scales of the first group to
    all (4 bits), or computes in 16 bits.
    """
    left, right = (next(_origins(name, makers), None) for name in product.input[:2])
    if left is None or left.op_type != "DequantizeLinear" or left.input[0] in tensors:
        return None
    if right is None or right.op_type != "DequantizeLinear" or right.input[0] not in tensors:
        return None
    codes = tensors[right.input[0]]
    grouped = any(entry.name == "block_size" for entry in right.attribute)
    if codes.data_type not in _MULTIPLIED or grouped != (codes.data_type == TensorProto.FLOAT4E2M1):
        raise QtoolError(
            f"{model}: {product.name or product.output[0]} multiplies weights in groups or in 4 bits "
            f"({right.input[0]}) by activations quantized to 8 bits; tensorrt_rtx 1.7.1 builds 4-bit ones "
            "without a warning but applies only the first group's scales; keep the activations in 16 bits, "
            "or the weights in 8 with a scale a channel"
        )
    return codes


def _origins(name: str, makers: dict[str, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The node that computed `name`, behind those that only reshape or convert."""
    while name in makers:
        node = makers[name]
        if node.op_type not in _PASSIVE:
            yield node
            return
        name = node.input[0]
