"""An interpreter of TensorRT networks in torch: what a parsed graph computes, layer by layer, without a GPU.

It walks the network that the builder is given, so the parser's own work, where inputs have been dropped and
weights misread, is under test too. Only the bytes of constants in 4 bits and fp8 are the graph's, by name:
the Python bindings hand them out to nobody.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tensorrt_rtx_bindings as trt
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

from qtool.core.fp4 import fp4_codes, fp4_values

DTYPES = {
    trt.DataType.FLOAT: torch.float32,
    trt.DataType.HALF: torch.float16,
    trt.DataType.INT32: torch.int32,
    trt.DataType.INT64: torch.int64,
    trt.DataType.BOOL: torch.bool,
    trt.DataType.INT8: torch.int8,
    trt.DataType.FP8: torch.float8_e4m3fn,
}


class Interpreter:
    """A parsed graph, to be run with inputs by name.

    Where the network computes in float16 the interpreter computes in `dtype`: in float32, so that what is
    compared is the network and not its rounding, or in float16 as it says. A layer or an option that the
    interpreter does not know is a KeyError or an AssertionError.
    """

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._logger = trt.Logger(trt.Logger.ERROR)
        self._builder = trt.Builder(self._logger)
        self._network = self._builder.create_network(0)
        parser = trt.OnnxParser(self._network, self._logger)
        assert parser.parse_from_file(str(model))
        self._codes = _codes(model)
        kinds = trt.LayerType
        self._kinds: dict[Any, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {
            kinds.CONSTANT: self._constant,
            kinds.CAST: lambda layer, x: self._to(x, layer.to_type),
            kinds.QUANTIZE: _quantize,
            kinds.DYNAMIC_QUANTIZE: _quantize_nvfp4,
            kinds.DEQUANTIZE: self._dequantize,
            kinds.SELECT: lambda layer, mask, a, b: torch.where(mask, a, b),
            kinds.GATHER: _gather,
            kinds.SHUFFLE: _shuffle,
            kinds.SHAPE: lambda layer, x: torch.tensor(x.shape),
            kinds.CONCATENATION: lambda layer, *xs: torch.cat(xs, layer.axis),
            kinds.ELEMENTWISE: lambda layer, a, b: _ELEMENTWISE[layer.op](a, b),
            kinds.UNARY: lambda layer, x: _UNARY[layer.op](x),
            kinds.ACTIVATION: lambda layer, x: _ACTIVATIONS[layer.type](layer, x),
            kinds.REDUCE: _reduce,
            kinds.MATRIX_MULTIPLY: _matmul,
            kinds.SLICE: _slice,
            kinds.UNSQUEEZE: lambda layer, x, axes: x.unsqueeze(int(axes) % (x.dim() + 1)),
            kinds.ROTARY_EMBEDDING: _rotary,
            kinds.ATTENTION_INPUT: _attention,
            kinds.ATTENTION_OUTPUT: lambda layer, x: x,
            kinds.IDENTITY: lambda layer, x: x,
        }

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The network's outputs."""
        values = {name: self._number(value) for name, value in inputs.items()}
        for index in range(self._network.num_layers):
            layer = self._network.get_layer(index)
            kind, places = layer.type, range(layer.num_inputs)
            tensors = [layer.get_input(place) for place in places]
            _become(layer, kind)
            result = self._kinds[kind](layer, *(tensor and values[tensor.name] for tensor in tensors))
            output = layer.get_output(0)
            if isinstance(result, tuple):  # codes and their scales
                values[layer.get_output(1).name] = result[1]
                result = result[0]
            assert len(output.shape) == result.dim(), f"{layer.name}: {result.shape}, said {output.shape}"
            sizes = zip(output.shape, result.shape, strict=True)
            assert all(said in (-1, size) for said, size in sizes), layer.name
            assert result.dtype == self._number(torch.empty(0, dtype=_dtype_of(output))).dtype, layer.name
            values[output.name] = result
        outputs = [self._network.get_output(index).name for index in range(self._network.num_outputs)]
        return {name: values[name] for name in outputs}

    @property
    def inputs(self) -> list[str]:
        """Names of the network's inputs."""
        return [self._network.get_input(index).name for index in range(self._network.num_inputs)]

    def _number(self, x: Tensor) -> Tensor:
        return x.to(self._dtype) if x.dtype == torch.float16 else x

    def _to(self, x: Tensor, dtype: Any) -> Tensor:
        return x.to(self._dtype if dtype == trt.DataType.HALF else DTYPES[dtype])

    def _constant(self, layer: Any) -> Tensor:
        if layer.name in self._codes:
            codes = self._codes[layer.name]
            assert tuple(layer.shape) == tuple(codes.shape)
            return codes
        values = np.array(layer.weights).reshape(tuple(layer.shape))
        return self._number(torch.from_numpy(values))

    @staticmethod
    def _dequantize(layer: Any, codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
        """Blocks along the axis where codes outnumber scales; one scale a channel, or in all, for 8 bits."""
        assert zero_point is None or not zero_point.any()
        if scale.dim() < 2:
            shape = [-1 if axis == layer.axis else 1 for axis in range(codes.dim())]
            return codes.to(scale.dtype) * (scale.view(shape) if scale.numel() > 1 else scale)
        axis = next(axis for axis in range(2) if codes.shape[axis] != scale.shape[axis])
        return codes.to(scale.dtype) * scale.repeat_interleave(codes.shape[axis] // scale.shape[axis], axis)


def _codes(model: Path) -> dict[str, Tensor]:
    found = {}
    for tensor in onnx.load(model).graph.initializer:
        if tensor.data_type == TensorProto.INT4:
            found[tensor.name] = torch.from_numpy(numpy_helper.to_array(tensor).astype(np.int8))
        elif tensor.data_type == TensorProto.FLOAT4E2M1:
            found[tensor.name] = torch.from_numpy(numpy_helper.to_array(tensor).astype(np.float32))
        elif tensor.data_type == TensorProto.FLOAT8E4M3FN:
            raw = np.frombuffer(tensor.raw_data, np.uint8).reshape(tuple(tensor.dims)).copy()
            found[tensor.name] = torch.from_numpy(raw).view(torch.float8_e4m3fn)
    return found


def _quantize(layer: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """One scale for all; what is beyond the largest code becomes it."""
    assert scale.numel() == 1
    assert zero_point is None or not zero_point.float().any()
    if layer.to_type == trt.DataType.FP8:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert layer.to_type == trt.DataType.INT8
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def _quantize_nvfp4(layer: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 16 inputs: e2m1 numbers, here in float32, and fp8 scales less the factor `scale`."""
    assert (layer.block_size, layer.axis) == (16, x.dim() - 1)
    assert (layer.to_type, layer.scale_type) == (trt.DataType.FP4, trt.DataType.FP8)
    blocks = x.unflatten(-1, (-1, 16)).float()
    own = (blocks.abs().amax(-1) / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn)
    codes = fp4_values(fp4_codes((blocks / (own.float() * scale)[..., None]).nan_to_num()))
    return codes.flatten(-2), own


def _dtype_of(tensor: Any) -> torch.dtype:
    """Torch's of what the interpreter holds: numbers of 4 bits are wider here."""
    wider = {trt.DataType.INT4: torch.int8, trt.DataType.FP4: torch.float32}
    return wider.get(tensor.dtype) or DTYPES[tensor.dtype]


def _become(layer: Any, kind: Any) -> None:
    """Layers are handed out as their base class; their options are in their own."""
    wanted = f"i{kind.name.replace('_', '')}layer".lower()
    layer.__class__ = next(getattr(trt, name) for name in dir(trt) if name.lower() == wanted)


def _gather(layer: Any, data: Tensor, indices: Tensor) -> Tensor:
    assert layer.mode == trt.GatherMode.DEFAULT
    assert layer.num_elementwise_dims == 0
    assert int(indices.min()) >= 0
    taken = data.index_select(layer.axis, indices.reshape(-1).long())
    return taken.view(*data.shape[: layer.axis], *indices.shape, *data.shape[layer.axis + 1 :])


def _shuffle(layer: Any, x: Tensor, shape: Tensor | None = None) -> Tensor:
    x = x.permute(tuple(layer.first_transpose)[: x.dim()])
    sizes = None if shape is None else shape.tolist()
    if shape is None and layer.reshape_dims is not None:
        sizes = list(layer.reshape_dims)
    if sizes is not None:
        if layer.zero_is_placeholder:
            sizes = [x.shape[place] if size == 0 else size for place, size in enumerate(sizes)]
        x = x.reshape(sizes)
    return x.permute(tuple(layer.second_transpose)[: x.dim()])


def _reduce(layer: Any, x: Tensor) -> Tensor:
    axes = [axis for axis in range(x.dim()) if layer.axes >> axis & 1]
    return _REDUCE[layer.op](x, axes, layer.keep_dims)


def _matmul(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    sides = []
    for side, operation in ((a, layer.op0), (b, layer.op1)):
        assert operation in (trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE)
        sides.append(side.mT if operation == trt.MatrixOperation.TRANSPOSE else side)
    return sides[0] @ sides[1]


def _slice(layer: Any, x: Tensor, start: Tensor | None = None, size: Tensor | None = None) -> Tensor:
    assert layer.mode == trt.SampleMode.STRICT_BOUNDS
    assert set(layer.stride) == {1}
    starts = list(layer.start) if start is None else start.tolist()
    sizes = list(layer.shape) if size is None else size.tolist()
    for axis, (begin, count) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(axis, begin, count)
    return x


def _rotary(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D], cos and sin [B, S, D / 2]."""
    assert not layer.interleaved
    assert layer.rotary_embedding_dim in (0, x.shape[-1])
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attention(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention [B, H, S, D] over the keys that the mask shows; no scale, heads shared evenly."""
    attention = layer.attention
    assert attention.norm_op == trt.AttentionNormalizationOp.SOFTMAX
    assert attention.causal_kind == trt.CausalMaskKind.NONE
    assert attention.mask is not None, "the parser dropped the mask"
    assert attention.query_form == attention.key_value_form == trt.AttentionIOForm.PADDED_BHND
    shared = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(shared, 1).mT
    weights = scores.masked_fill(~mask, -torch.inf).float().softmax(-1).to(q.dtype)
    return weights @ v.repeat_interleave(shared, 1)


_ELEMENTWISE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    trt.ElementWiseOperation.SUM: torch.add,
    trt.ElementWiseOperation.SUB: torch.sub,
    trt.ElementWiseOperation.PROD: torch.mul,
    trt.ElementWiseOperation.DIV: torch.div,
    trt.ElementWiseOperation.POW: torch.pow,
    trt.ElementWiseOperation.MIN: torch.minimum,
    trt.ElementWiseOperation.MAX: torch.maximum,
    trt.ElementWiseOperation.EQUAL: torch.eq,
}
_UNARY: dict[Any, Callable[[Tensor], Tensor]] = {
    trt.UnaryOperation.SQRT: torch.sqrt,
    trt.UnaryOperation.RECIP: torch.reciprocal,
    trt.UnaryOperation.SIN: torch.sin,
    trt.UnaryOperation.COS: torch.cos,
    trt.UnaryOperation.ABS: torch.abs,
    trt.UnaryOperation.ROUND: torch.round,
}
_ACTIVATIONS: dict[Any, Callable[[Any, Tensor], Tensor]] = {
    trt.ActivationType.SIGMOID: lambda layer, x: torch.sigmoid(x),
    trt.ActivationType.CLIP: lambda layer, x: x.clamp(layer.alpha, layer.beta),
}
_REDUCE: dict[Any, Callable[[Tensor, list[int], bool], Tensor]] = {
    trt.ReduceOperation.AVG: torch.mean,
    trt.ReduceOperation.SUM: torch.sum,
    trt.ReduceOperation.MAX: torch.amax,
    trt.ReduceOperation.MIN: torch.amin,
}
