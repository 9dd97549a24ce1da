"""The OpenVINO backend: an ``openvino.Model`` for the CPU, attention through its PagedAttention op.

Every weight keeps its stored numbers exactly: integer codes with float32 scales, float16 or bfloat16
constants. The CPU plugin decompresses them inside its matrix products; all sums are in float32.
"""

import errno
import math
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op import Parameter, _PagedAttentionExtension
from openvino.opset15 import scatter_nd_update
from torch import Tensor

from qtool.compile.backends.openvino_activation import fake_quantize
from qtool.compile.code_products import stored_bits
from qtool.compile.codes import code_bytes, pack4
from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import Attention, RowsOf, Weights, decode
from qtool.compile.hidden import HiddenLayer
from qtool.compile.layers import Mixture
from qtool.compile.rope import Rope
from qtool.compile.stack import alike, stack
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Linear, QuantizedTensor

MODEL = "model.xml"
Node: TypeAlias = ov.Output
_VECTORS = (
    "token_ids",
    "positions",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "logit_rows",
    "tree_masks_begins",
)
_DENSE = {torch.float32: ov.Type.f32, torch.float16: ov.Type.f16, torch.bfloat16: ov.Type.bf16}


class OpenVino:
    """The decoder's operations as nodes of a graph whose parameters are one ragged batch and the pool."""

    def __init__(self) -> None:
        self.parameters = {name: _parameter(name, ov.Type.i32, [-1]) for name in _VECTORS}
        self.parameters["tree_masks"] = _parameter("tree_masks", ov.Type.u8, [-1])
        self.parameters["max_context_len"] = _parameter("max_context_len", ov.Type.i32, [])
        self._rotations: dict[Rope, tuple[Node, Node]] = {}
        self._table: tuple[Tensor, Node] | None = None

    def embed(self, table: Tensor) -> Node:
        constant = _constant(table)
        self._table = (table, constant)
        return _float32(ops.gather(constant, self._input("token_ids"), _integers(0)).output(0))

    def linears(self, x: Node, group: Sequence[Linear]) -> list[Node]:
        if not alike(group):
            return [self._linear(x, linear) for linear in group]
        sizes = [linear.weight.shape[0] for linear in group]
        product = self._linear(x, stack(group))
        return list(ops.variadic_split(product, _integers(1), _integers(sizes)).outputs())

    def rms_norm(self, x: Node, weight: Tensor, eps: float) -> Node:
        heads = _reshape(x, [0, -1, len(weight)])
        mean = ops.reduce_mean(ops.power(heads, _floats(2.0)), _integers([-1]), True)
        inverse = ops.divide(_floats(1.0), ops.sqrt(ops.add(mean, _floats(eps))))
        normed = ops.multiply(ops.multiply(heads, inverse), _float32(_constant(weight)))
        return _reshape(normed.output(0), [0, -1])

    def rope(self, x: Node, rope: Rope) -> Node:
        """In the form [T, H, 1, D] that the plugin fuses into one kernel, given the split's axis as 3."""
        if rope not in self._rotations:
            positions = ops.convert(self._input("positions"), ov.Type.f32)
            half = ops.multiply(_reshape(positions.output(0), [-1, 1, 1, 1]), _floats(rope.frequencies()))
            angles = ops.concat([half, half], -1)
            self._rotations[rope] = (
                self.scale(ops.cos(angles).output(0), rope.magnitude),
                self.scale(ops.sin(angles).output(0), rope.magnitude),
            )
        cos, sin = self._rotations[rope]
        heads, rest = _reshape(x, [0, -1, 1, rope.head_dim]), []
        if rope.dim < rope.head_dim:
            sizes = _integers([rope.dim, rope.head_dim - rope.dim])
            heads, *rest = ops.variadic_split(heads, _integers(3), sizes).outputs()
        first, second = ops.variadic_split(heads, _integers(3), _integers([rope.dim // 2] * 2)).outputs()
        turned = ops.concat([ops.multiply(second, _floats(-1.0)), first], -1)
        rotated = ops.add(ops.multiply(heads, cos), ops.multiply(turned, sin))
        return _reshape(ops.concat([rotated, *rest], -1).output(0) if rest else rotated.output(0), [0, -1])

    def attention(self, q: Node, k: Node, v: Node, attention: Attention) -> Node:
        caches = [self._cache(f"{kind}_cache.{attention.layer}") for kind in ("key", "value")]
        batch = [
            self._input(name)
            for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
        ]
        none = _empty(ov.Type.i32)
        node = _PagedAttentionExtension(
            [
                *(q, k, v),
                *caches,
                *batch,
                _floats(attention.scale),
                _int32(attention.window or 0),
                _empty(ov.Type.f32),  # alibi slopes
                self._input("max_context_len"),
                none,  # score aggregation window
                *(none, none, _empty(ov.Type.f32)),  # cache rotation: blocks, deltas, table
                *(_empty(ov.Type.f32), _int32(0), _int32(0)),  # sparse attention: threshold, block, stride
                _empty(ov.Type.f32, rank=4),  # attention sinks
                *(_int32(0), none, none, none),  # cache eviction
                none,  # token types
                *(self._input("tree_masks"), self._input("tree_masks_begins")),
            ]
        )
        return node.output(0)

    def mixture(
        self, x: Node, logits: Node, mixture: Mixture, experts: Sequence[Callable[[Node], Node]]
    ) -> Node:
        """Each expert on the rows that chose it: the weights of one that none chose are not read."""
        shares = _shares(logits, mixture)
        columns = ops.split(ops.transpose(shares, _integers([1, 0])), _integers(0), len(experts)).outputs()
        total = self.scale(x, 0.0)
        for column, expert in zip(columns, experts, strict=True):
            share = _reshape(column, [-1, 1])
            rows = ops.gather(ops.non_zero(share, "i32"), _integers(0), _integers(0)).output(0)
            chosen, weight = (ops.gather(each, rows, _integers(0)).output(0) for each in (x, share))
            update = self.multiply(expert(chosen), weight)
            total = scatter_nd_update(total, _reshape(rows, [-1, 1]), update, "sum").output(0)
        return total

    def activation(self, name: str, x: Node) -> Node:
        return _ACTIVATIONS[name](x).output(0)

    def scale(self, x: Node, factor: float) -> Node:
        return x if factor == 1 else ops.multiply(x, _floats(factor)).output(0)

    def multiply(self, a: Node, b: Node) -> Node:
        return ops.multiply(a, b).output(0)

    def add(self, a: Node, b: Node) -> Node:
        return ops.add(a, b).output(0)

    def take_rows(self, x: Node, rows: RowsOf = "logit_rows") -> Node:
        if rows not in self.parameters:  # an engine without hidden states has no input for them
            self.parameters[rows] = _parameter(rows, ov.Type.i32, [-1])
        return ops.gather(x, self._input(rows), _integers(0)).output(0)

    def _input(self, name: str) -> Node:
        return self.parameters[name].output(0)

    def _cache(self, name: str) -> Node:
        """A pool of one layer; the plugin chooses its type and shape when it compiles."""
        self.parameters[name] = _parameter(name, ov.Type.dynamic, None)
        return self._input(name)

    def _linear(self, x: Node, linear: Linear) -> Node:
        weight = linear.weight
        if linear.activation is not None:
            x = fake_quantize(x, linear.activation)
        if linear.order is not None:
            x = ops.gather(x, _integers(linear.order.tolist()), _integers(1)).output(0)
        if isinstance(weight, QuantizedTensor):
            matrix = _dequantized(weight)
        elif isinstance(weight, Fp8Tensor):
            matrix = _dequantized_fp8(weight)
        elif isinstance(weight, Fp4Tensor):
            matrix = _dequantized_fp4(weight)
        elif self._table is not None and weight is self._table[0]:
            matrix = _float32(self._table[1])
        else:
            matrix = _float32(_constant(weight))
        product = ops.matmul(x, matrix, False, True)
        if linear.bias is not None:
            product = ops.add(product, _float32(_constant(linear.bias)))
        return product.output(0)


_ACTIVATIONS = {"silu": ops.swish, "gelu_pytorch_tanh": partial(ops.gelu, approximation_mode="TANH")}


def build_model(
    config: DecoderConfig, weights: Weights, hidden_layers: Sequence[HiddenLayer] = ()
) -> ov.Model:
    """The decoder as a graph: int32 inputs of a ragged batch, the pools of each layer, logits [R, V].

    With `hidden_layers` its second output is their hidden states [F, len(hidden_layers) · hidden].
    """
    backend = OpenVino()
    decoded = decode(config, weights, backend, hidden_layers)
    outputs = {"logits": decoded.logits}
    if decoded.hidden:
        outputs["hidden_states"] = ops.concat(list(decoded.hidden), 1).output(0)
    for name, output in outputs.items():
        output.get_tensor().set_names({name})
    return ov.Model(list(outputs.values()), list(backend.parameters.values()), config.architecture)


def write(
    checkpoint: Checkpoint, config: DecoderConfig, folder: Path, hidden_layers: Sequence[HiddenLayer] = ()
) -> None:
    """Write the graph and its weights as ``model.xml`` and ``model.bin``."""
    save(build_model(config, CheckpointWeights(config, checkpoint), hidden_layers), folder)


def save(model: ov.Model, folder: Path) -> None:
    """Write a graph and its weights. Raises OSError when the disk is full, of which OpenVINO says only that a
    stream failed."""
    try:
        ov.save_model(model, folder / MODEL, compress_to_fp16=False)
    except RuntimeError as error:
        constants = (node.output(0) for node in model.get_ops() if node.get_type_name() == "Constant")
        bits = sum(one.get_element_type().bitwidth * math.prod(one.get_shape()) for one in constants)
        if bits // 8 > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / MODEL)) from error
        raise


def _shares(logits: Node, mixture: Mixture) -> Node:
    """Each expert's share of each row [T, experts], 0 where it is not chosen."""
    probabilities = ops.softmax(logits, 1)
    count = _integers(mixture.num_chosen)
    shares, chosen = ops.topk(probabilities, count, 1, "max", "value", stable=True).outputs()
    if mixture.normalized:
        shares = ops.divide(shares, ops.reduce_sum(shares, _integers([1]), True)).output(0)
    nothing = ops.multiply(probabilities, _floats(0.0))
    return ops.scatter_elements_update(nothing, chosen, shares, _integers(1)).output(0)


def _dequantized(weight: QuantizedTensor) -> Node:
    """``(codes - zero_point) * scale`` [N, K] in the form that the plugin fuses into a matrix product.

    Symmetric codes stay signed; with zero points both are shifted to unsigned. Scales are float32, so
    that any stored dtype is exact.
    """
    out_features, in_features = weight.shape
    size = _safe_group(weight)
    repeats = in_features // weight.scale.shape[1] // size
    codes = _codes(weight.codes.view(out_features, -1, size), weight)
    scale = weight.scale.float().repeat_interleave(repeats, 1)[..., None]
    if weight.zero_point is not None:
        zero_point = weight.zero_point.repeat_interleave(repeats, 1)[..., None]
        codes = ops.subtract(codes, _codes(zero_point, weight)).output(0)
    return _reshape(ops.multiply(codes, _constant(scale)).output(0), [out_features, in_features])


def _dequantized_fp8(weight: Fp8Tensor) -> Node:
    """``code * scale`` [N, K]. The plugin (2026.4) keeps the product in float32."""
    columns, in_features = weight.scheme.columns, weight.shape[1]
    size = in_features if columns is None else math.gcd(columns, in_features)
    raw = weight.codes.contiguous().view(torch.uint8).numpy()
    return _blocks(raw, ov.Type.f8e4m3, weight.scales()[:, ::size], weight.shape)


def _dequantized_fp4(weight: Fp4Tensor) -> Node:
    """``code * scale`` [N, K], which the plugin multiplies packed. Both scales as one, in float32."""
    raw = pack4(weight.codes.contiguous().numpy().reshape(-1))
    return _blocks(raw, ov.Type.f4e2m1, weight.scales(), weight.shape)


def _blocks(raw: NDArray[np.uint8], kind: ov.Type, scale: Tensor, shape: tuple[int, int]) -> Node:
    """Codes [N, K] of a floating point type times scales [N, blocks]."""
    blocks = scale.expand(shape[0], -1)[..., None]
    codes = ops.convert(
        _from_bytes(raw, [shape[0], blocks.shape[1], shape[1] // blocks.shape[1]], kind), ov.Type.f32
    )
    return _reshape(ops.multiply(codes, _constant(blocks)).output(0), list(shape))


def _safe_group(weight: QuantizedTensor) -> int:
    """The group size to build with: the weight's own, or a divisor that means the same numbers.

    With 4-bit groups over 32 that 32 does not divide, OpenVINO 2026.4 applies the wrong scales to up to
    4 rows, without a word; with 8 bits, in groups that 4 does not divide.
    """
    groups = weight.scale.shape[1]
    size = weight.shape[1] // groups
    return size if groups == 1 or size % 32 == 0 else math.gcd(size, 32)


def _codes(codes: Tensor, weight: QuantizedTensor) -> Node:
    """Integer codes as a packed constant, converted to float32."""
    raw, signed = code_bytes(codes, weight)
    kind = getattr(ov.Type, f"{'i' if signed else 'u'}{stored_bits(weight.scheme)}")
    return ops.convert(_from_bytes(raw, list(codes.shape), kind), ov.Type.f32).output(0)


def _parameter(name: str, kind: ov.Type, shape: list[int] | None) -> Parameter:
    parameter = Parameter(kind, ov.PartialShape.dynamic() if shape is None else ov.PartialShape(shape))
    parameter.set_friendly_name(name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _constant(tensor: Tensor) -> Node:
    """A floating point tensor, in its own dtype."""
    raw = tensor.contiguous().view(torch.uint8).numpy()
    return _from_bytes(raw, list(tensor.shape), _DENSE[tensor.dtype])


def _from_bytes(raw: NDArray[np.uint8], shape: list[int], kind: ov.Type) -> Node:
    """A constant with memory of its own: one made from an array would share it and not keep it alive."""
    tensor = ov.Tensor(kind, ov.Shape(shape))
    tensor.data.view(np.uint8).reshape(-1)[:] = raw.reshape(-1)
    return ops.constant(tensor).output(0)


def _float32(node: Node) -> Node:
    return node if node.get_element_type() == ov.Type.f32 else ops.convert(node, ov.Type.f32).output(0)


def _floats(values: float | NDArray[np.float32]) -> Node:
    return ops.constant(np.asarray(values, dtype=np.float32)).output(0)


def _integers(values: int | list[int]) -> Node:
    return ops.constant(np.asarray(values, dtype=np.int64)).output(0)


def _int32(value: int) -> Node:
    return ops.constant(np.asarray(value, dtype=np.int32)).output(0)


def _empty(kind: ov.Type, rank: int = 1) -> Node:
    return ops.constant(ov.Tensor(kind, ov.Shape([0] * rank))).output(0)


def _reshape(node: Node, shape: list[int]) -> Node:
    """Reshape, where 0 keeps a dimension."""
    return ops.reshape(node, _integers(shape), True).output(0)
