"""Weights as constants of an ONNX graph, dequantized where they are used.

4-bit codes are a blocked DequantizeLinear over [K, N] along K, one block for a whole channel; 8-bit codes
with one scale a channel are a DequantizeLinear along N, those of blocks a blocked one. Symmetric codes are
int4 or int8 without a zero point, asymmetric ones uint4 or uint8 with one. Codes of 2 or 3 bits are stored
in 4, of 5 to 7 in 8. fp8 codes stay what they are. fp4 codes, which ONNX Runtime does not read on a CPU, are
stored as int8: the same numbers.
"""

import math

import torch
from onnx import TensorProto

from qtool.compile.backends.onnx_graph import Graph, Tensor
from qtool.compile.code_products import stored_bits
from qtool.compile.codes import as_int8, code_bytes
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Quantized, QuantizedTensor
from qtool.errors import QtoolError

KINDS = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}


def dense(graph: Graph, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """A floating point tensor in `dtype`; a float32 graph stores it in its own, which is exact."""
    stored = tensor if dtype == torch.float32 else in_range(tensor, dtype)
    weight = graph.weight(name, floats(stored))
    return weight if stored.dtype == dtype else graph.node("Cast", weight, to=KINDS[dtype])


def matrix(graph: Graph, weight: Quantized, dtype: torch.dtype) -> str:
    """A quantized weight [N, K] as numbers of `dtype`, the right side of a product, [K, N]."""
    if isinstance(weight, Fp4Tensor):
        weight = as_int8(weight)
    in_features = weight.shape[1]
    scale, blocked = _scales(weight)
    layout = {"axis": 0, "block_size": in_features // len(scale)} if blocked else {"axis": 1}
    inputs = [
        graph.weight("codes", stored_codes(weight)),
        graph.weight("scale", floats(in_range(scale if blocked else scale[0], dtype))),
    ]
    if isinstance(weight, QuantizedTensor) and weight.zero_point is not None:
        zero_point = weight.zero_point.T if blocked else weight.zero_point[:, 0]
        inputs.append(graph.weight("zero_point", _integers(zero_point, weight)))
    return graph.node("DequantizeLinear", *inputs, **layout)


def stored_codes(weight: QuantizedTensor | Fp8Tensor) -> Tensor:
    """The codes [K, N]."""
    codes = weight.codes.T
    if isinstance(weight, QuantizedTensor):
        return _integers(codes, weight)
    raw = codes.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Tensor(raw, TensorProto.FLOAT8E4M3FN, codes.shape)


def scales_of(weight: QuantizedTensor | Fp8Tensor, size: int) -> torch.Tensor:
    """float32 scales of each `size` inputs, which share one: [K / size, N]."""
    if isinstance(weight, QuantizedTensor):
        repeats = weight.shape[1] // weight.scale.shape[1] // size
        return weight.scale.float().repeat_interleave(repeats, 1).T
    every = weight.by_row().scale.float()
    starts = torch.arange(0, weight.shape[1], size) // (weight.scheme.columns or weight.shape[1])
    return every[:, starts].T


def _scales(weight: QuantizedTensor | Fp8Tensor) -> tuple[torch.Tensor, bool]:
    """float32 scales [blocks of K, N], and whether they are written as blocks."""
    in_features = weight.shape[1]
    if isinstance(weight, QuantizedTensor):
        blocked = stored_bits(weight.scheme) == 4 or weight.scale.shape[1] > 1
        return weight.scale.float().T, blocked
    columns = weight.scheme.columns
    if columns is None:
        return scales_of(weight, in_features), False
    return scales_of(weight, math.gcd(columns, in_features)), True


def _integers(codes: torch.Tensor, weight: QuantizedTensor) -> Tensor:
    """Codes, or zero points, of `weight`."""
    raw, signed = code_bytes(codes, weight)
    kind = getattr(TensorProto, f"{'INT' if signed else 'UINT'}{stored_bits(weight.scheme)}")
    return Tensor(raw, kind, codes.shape)


def floats(tensor: torch.Tensor) -> Tensor:
    """A floating point tensor, in its own dtype."""
    # flat first: a single row transposed is contiguous, but not in its last dimension
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Tensor(raw, KINDS[tensor.dtype], tensor.shape)


def in_range(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`; QtoolError where a number is too large for it."""
    rounded = tensor.to(dtype)
    if not bool(rounded.isfinite().all()):
        raise QtoolError(
            f"a weight reaches {tensor.abs().max().item():g}, more than float16 can hold; "
            "compile with float32"
        )
    return rounded
