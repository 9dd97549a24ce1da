"""The ONNX backend: one portable graph (opset 23) whose attention reads a paged KV pool.

A step is a batch of B sequences, each padded to S new tokens over a past of M blocks, P = M·block_size
slots. One graph serves a prefill chunk (B = 1), decode (S = 1) and the verification of drafts: B, S and M
are sizes that each run chooses. ``C`` below is the element type that the graph computes in, float32 or
float16; Hkv, D and block_size are fixed.

Inputs:

- ``token_ids`` int32 [B, S]; padding may be any token.
- ``positions`` int32 [B, S]: of each new token in its sequence; of a tree's node, its depth added.
- ``block_tables`` int32 [B, M]: the blocks of each sequence's past; padding may be any block, such as 0.
- ``logit_rows`` int32 [R]: which of the B·S new tokens want logits, row-major.
- ``hidden_rows`` int32 [F]: which of them want hidden states; only in a graph that gives some.
- ``attention_mask`` bool [B, 1, S, P + S]: which of the past slots, then of the new tokens, a new token
  sees: past slots that are filled, new tokens by causality or by a tree. Layers with a sliding window of W
  read ``attention_mask.W`` instead; the graph has the masks that its layers need. A row must see something,
  padding too: itself, say.
- ``key_pool.i``, ``value_pool.i`` C [blocks·Hkv, block_size, D] for each layer i: a pool [blocks, Hkv,
  block_size, D] with its two outer dimensions as one. In this layout one Gather by ``table·Hkv + head``
  yields [B, Hkv, P, D], what attention reads, in runs of block_size·D numbers and without a transpose.

Outputs: ``logits`` float32 [R, V]; ``hidden_states`` float32 [F, hidden layers · hidden] where the graph is
made with some; for each layer ``new_key.i`` and ``new_value.i`` C [B, Hkv, S, D], keys
after their rotary embedding. The graph never writes the pool: the runtime commits new keys and values to the
slots of its choice.

Weights are stored as `onnx_weights` says. A float32 graph keeps every stored number exactly: 16-bit weights
stay 16 bits wide behind a Cast. In a float16 graph all of them, scales too, are float16; products of rounded
inputs are float32 in both, see `onnx_activation`. Large weights lie in ``model.onnx.data`` beside the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto

from qtool.compile.backends.onnx_activation import in_order, rounded_product
from qtool.compile.backends.onnx_graph import Graph
from qtool.compile.backends.onnx_weights import KINDS, dense, matrix
from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import Attention, RowsOf, Weights, decode
from qtool.compile.hidden import HiddenLayer
from qtool.compile.layers import Mixture
from qtool.compile.rope import Rope
from qtool.compile.stack import alike, stack
from qtool.compile.weights import CheckpointWeights
from qtool.core.activation import Activation
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import Linear, Weight

MODEL, DATA = "model.onnx", "model.onnx.data"
BLOCK_SIZE = 32
_NUMPY: dict[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float16: np.float16}
_INT32, _BOOL = TensorProto.INT32, TensorProto.BOOL


@dataclass(frozen=True)
class Rows:
    """A tensor of the graph [B, S, features], or [R, features] once the wanted rows are taken."""

    name: str
    features: int


class Onnx:
    """The decoder's operations as nodes of `graph`, computing in `dtype` over blocks of `block_size`."""

    def __init__(self, graph: Graph, dtype: torch.dtype, block_size: int) -> None:
        self._graph, self._dtype, self._block_size = graph, dtype, block_size
        self._kind = KINDS[dtype]
        self._token_ids = graph.input("token_ids", _INT32, ["B", "S"])
        self._positions = graph.input("positions", _INT32, ["B", "S"])
        self._tables = graph.input("block_tables", _INT32, ["B", "M"])
        graph.input("logit_rows", _INT32, ["R"])
        self._rotations: dict[Rope, tuple[str, str]] = {}
        self._pool_rows: dict[int, str] = {}
        self._table: tuple[torch.Tensor, str] | None = None
        self.new_entries: dict[str, tuple[str, Sequence[int | str]]] = {}
        """The tensors of the new keys and values with their shapes, by the name to give them out under."""

    def embed(self, table: torch.Tensor) -> Rows:
        stored = self._dense("embedding", table)
        self._table = (table, stored)
        return Rows(self._graph.node("Gather", stored, self._token_ids, axis=0), table.shape[1])

    def linears(self, x: Rows, group: Sequence[Linear]) -> list[Rows]:
        if not alike(group):
            return [self._linear(x, linear) for linear in group]
        product, sizes = self._linear(x, stack(group)), [linear.weight.shape[0] for linear in group]
        parts = self._graph.nodes("Split", [product.name, self._graph.integers(*sizes)], len(group), axis=-1)
        return [Rows(name, size) for name, size in zip(parts, sizes, strict=True)]

    def rms_norm(self, x: Rows, weight: torch.Tensor, eps: float) -> Rows:
        scale = self._dense("norm", weight)
        if len(weight) == x.features:
            return Rows(self._graph.node("RMSNormalization", x.name, scale, axis=-1, epsilon=eps), x.features)
        heads = self._reshape(x.name, 0, 0, -1, len(weight))
        normed = self._graph.node("RMSNormalization", heads, scale, axis=-1, epsilon=eps)
        return Rows(self._reshape(normed, 0, 0, x.features), x.features)

    def rope(self, x: Rows, rope: Rope) -> Rows:
        cos, sin = self._rotation(rope)
        sizes = {"num_heads": x.features // rope.head_dim}
        if rope.dim < rope.head_dim:
            sizes["rotary_embedding_dim"] = rope.dim
        return Rows(self._graph.node("RotaryEmbedding", x.name, cos, sin, **sizes), x.features)

    def attention(self, q: Rows, k: Rows, v: Rows, attention: Attention) -> Rows:
        query = self._heads(self._scaled_once(q, attention.scale), attention.head_dim)
        key, value = (
            self._past_and_new(f"{kind}.{attention.layer}", new, attention)
            for kind, new in (("key", k), ("value", v))
        )
        mask = self._mask(attention.window)
        mixed = self._graph.node("Attention", query, key, value, mask, scale=1.0)
        rows = self._graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
        return Rows(self._reshape(rows, 0, 0, q.features), q.features)

    def mixture(
        self, x: Rows, logits: Rows, mixture: Mixture, experts: Sequence[Callable[[Rows], Rows]]
    ) -> Rows:
        """Every expert on every row: what depends on the choice of rows, no profile could bound."""
        shares = self._shares(logits, mixture)
        columns = self._graph.nodes(
            "Split", [shares, self._graph.integers(*[1] * len(experts))], len(experts), axis=-1
        )
        parts = (
            self.multiply(expert(x), Rows(column, 1)) for column, expert in zip(columns, experts, strict=True)
        )
        return reduce(self.add, parts)

    def activation(self, name: str, x: Rows) -> Rows:
        return _ACTIVATIONS[name](self._graph, x)

    def scale(self, x: Rows, factor: float) -> Rows:
        return Rows(self._scaled(x.name, factor, _NUMPY[self._dtype]), x.features)

    def multiply(self, a: Rows, b: Rows) -> Rows:
        return Rows(self._graph.node("Mul", a.name, b.name), a.features)

    def add(self, a: Rows, b: Rows) -> Rows:
        return Rows(self._graph.node("Add", a.name, b.name), a.features)

    def take_rows(self, x: Rows, rows: RowsOf = "logit_rows") -> Rows:
        wanted = self._graph.input(rows, _INT32, ["R" if rows == "logit_rows" else "F"])
        every = self._reshape(x.name, -1, x.features)
        return Rows(self._graph.node("Gather", every, wanted, axis=0), x.features)

    def _shares(self, logits: Rows, mixture: Mixture) -> str:
        """Each expert's share of each row, 0 where it is not chosen; taken in float32."""
        graph = self._graph
        exact = graph.node("Cast", logits.name, to=TensorProto.FLOAT)
        probabilities = graph.node("Softmax", exact, axis=-1)
        shares, chosen = graph.nodes("TopK", [probabilities, graph.integers(mixture.num_chosen)], 2, axis=-1)
        if mixture.normalized:
            shares = graph.node("Div", shares, graph.node("ReduceSum", shares, graph.integers(-1)))
        nothing = self._scaled(probabilities, 0.0, np.float32)
        spread = graph.node("ScatterElements", nothing, chosen, shares, axis=-1)
        return graph.node("Cast", spread, to=self._kind)

    def _linear(self, x: Rows, linear: Linear) -> Rows:
        weight = linear.weight
        if linear.activation is not None:
            exact = self._cast(x.name, self._dtype, torch.float32)
            product = self._rounded_product(exact, linear, linear.activation)
            product = self._cast(product, torch.float32, self._dtype)
        elif self._table is not None and weight is self._table[0]:  # a tied head, stored once
            product = self._graph.node("Gemm", x.name, self._table[1], transB=1)
        else:
            inputs = in_order(self._graph, x.name, linear.order)
            product = self._graph.node("MatMul", inputs, self._matrix(weight))
        if linear.bias is not None:
            product = self._graph.node("Add", product, self._dense("bias", linear.bias))
        return Rows(product, weight.shape[0])

    def _rounded_product(self, x: str, linear: Linear, activation: Activation) -> str:
        return rounded_product(self._graph, x, linear, activation)

    def _matrix(self, weight: Weight) -> str:
        """A weight [N, K] as the right side of a product, [K, N]."""
        if isinstance(weight, torch.Tensor):
            return self._dense("linear", weight.T)
        return matrix(self._graph, weight, self._dtype)

    def _dense(self, name: str, tensor: torch.Tensor) -> str:
        return dense(self._graph, name, tensor, self._dtype)

    def _cast(self, name: str, source: torch.dtype, target: torch.dtype) -> str:
        return name if source == target else self._graph.node("Cast", name, to=KINDS[target])

    def _scaled_once(self, q: Rows, scale: float) -> Rows:
        """Queries times attention's scale, rounded once.

        Given the scale, TensorRT multiplies queries and keys each by its root, in float16: four roundings.
        """
        exact = self._scaled(self._cast(q.name, self._dtype, torch.float32), scale, np.float32)
        return Rows(self._cast(exact, torch.float32, self._dtype), q.features)

    def _scaled(self, name: str, factor: float, kind: type[np.floating]) -> str:
        """A tensor, whose elements are of type `kind`, times a number."""
        if factor == 1:
            return name
        return self._graph.node("Mul", name, self._graph.constant(np.array(factor, kind)))

    def _rotation(self, rope: Rope) -> tuple[str, str]:
        """Cosine and sine [B, S, dim / 2] of the angles at the step's positions, taken in float32."""
        if rope not in self._rotations:
            positions = self._graph.node("Cast", self._positions, to=TensorProto.FLOAT)
            column = self._graph.node("Unsqueeze", positions, self._graph.integers(-1))
            angles = self._graph.node("Mul", column, self._graph.constant(rope.frequencies()))
            cos, sin = (
                self._scaled(self._graph.node(function, angles), rope.magnitude, np.float32)
                for function in ("Cos", "Sin")
            )
            if self._dtype != torch.float32:
                cos, sin = (self._graph.node("Cast", factor, to=self._kind) for factor in (cos, sin))
            self._rotations[rope] = cos, sin
        return self._rotations[rope]

    def _past_and_new(self, name: str, new: Rows, attention: Attention) -> str:
        """The keys or values [B, Hkv, P + S, D] of the pool's slots, then of the new tokens."""
        pool, entries = self._pool(name, attention), self._give_out(name, new, attention)
        blocks = self._graph.node("Gather", pool, self._rows_of(attention.num_kv_heads), axis=0)
        past = self._reshape(blocks, 0, 0, -1, attention.head_dim)
        return self._graph.node("Concat", past, entries, axis=2)

    def _pool(self, name: str, attention: Attention) -> str:
        """The pool of a layer's keys or values, as ``key.0`` names them."""
        shape: list[int | str] = ["pool_rows", self._block_size, attention.head_dim]
        return self._graph.input(name.replace(".", "_pool."), self._kind, shape)

    def _give_out(self, name: str, new: Rows, attention: Attention) -> str:
        """New keys or values [B, Hkv, S, D], which become outputs of the graph."""
        entries = self._heads(new, attention.head_dim)
        self.new_entries[f"new_{name}"] = entries, ("B", attention.num_kv_heads, "S", attention.head_dim)
        return entries

    def _rows_of(self, heads: int) -> str:
        """The pool's rows [B, Hkv, M] that hold each head of the blocks of the past."""
        if heads not in self._pool_rows:
            tables = self._graph.node("Unsqueeze", self._tables, self._graph.integers(1))
            first = self._graph.node("Mul", tables, self._graph.constant(np.array(heads, np.int32)))
            head = self._graph.constant(np.arange(heads, dtype=np.int32).reshape(1, heads, 1))
            self._pool_rows[heads] = self._graph.node("Add", first, head)
        return self._pool_rows[heads]

    def _mask(self, window: int | None) -> str:
        name = "attention_mask" if window is None else f"attention_mask.{window}"
        return self._graph.input(name, _BOOL, ["B", 1, "S", "P+S"])

    def _heads(self, x: Rows, head_dim: int) -> str:
        """[B, S, heads·D] as [B, heads, S, D]."""
        heads = self._reshape(x.name, 0, 0, x.features // head_dim, head_dim)
        return self._graph.node("Transpose", heads, perm=[0, 2, 1, 3])

    def _reshape(self, name: str, *shape: int) -> str:
        """Reshape, where 0 keeps a dimension."""
        return self._graph.node("Reshape", name, self._graph.integers(*shape))


def _silu(graph: Graph, x: Rows) -> Rows:
    return Rows(graph.node("Mul", x.name, graph.node("Sigmoid", x.name)), x.features)


def _gelu_tanh(graph: Graph, x: Rows) -> Rows:
    return Rows(graph.node("Gelu", x.name, approximate="tanh"), x.features)


_ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


def write_onnx(
    config: DecoderConfig,
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK_SIZE,
    hidden_layers: Sequence[HiddenLayer] = (),
    make: Callable[[Graph, torch.dtype, int], Onnx] = Onnx,
) -> Path:
    """Write the decoder as ``model.onnx`` with its weights beside it; the path of the former.

    `dtype`, float32 or float16, is what the graph computes in and what its pools hold. Weights are read
    one by one and streamed to the file. `make` makes the operations, which may have nodes of their own.
    Raises QtoolError for a weight that float16 cannot hold.
    """
    with (folder / DATA).open("wb") as data:
        graph = Graph(data, DATA)
        backend = make(graph, dtype, block_size)
        decoded = decode(config, weights, backend, hidden_layers)
    outputs: dict[str, tuple[str, Sequence[int | str]]] = {
        "logits": (decoded.logits.name, ["R", config.vocab_size])
    }
    if decoded.hidden:
        joined = graph.node("Concat", *(rows.name for rows in decoded.hidden), axis=-1)
        outputs["hidden_states"] = joined, ["F", config.hidden_size * len(decoded.hidden)]
    for name, (value, shape) in outputs.items():
        exact = value if dtype == torch.float32 else graph.node("Cast", value, to=TensorProto.FLOAT)
        graph.output(name, exact, TensorProto.FLOAT, shape)
    for name, (value, shape) in backend.new_entries.items():
        graph.output(name, value, KINDS[dtype], shape)
    onnx.save(graph.model(config.architecture), folder / MODEL)
    return folder / MODEL


def write(
    checkpoint: Checkpoint, config: DecoderConfig, folder: Path, hidden_layers: Sequence[HiddenLayer] = ()
) -> None:
    """Write the graph, in float32."""
    write_onnx(config, CheckpointWeights(config, checkpoint), folder, hidden_layers=hidden_layers)
