"""The ONNX graph with attention as a plugin: the inputs and outputs of the native graph, nothing gathered.

What the kernel wants to know beyond the native graph's inputs lies in them. A sequence's first new token has
no other before it, so its position is the length of the past; all sequences of a call have S new tokens; and
the last S columns of the mask say which of those see one another, in a chain and in a tree. A sliding window
is the kernel's own affair, by position.
"""

import numpy as np
import torch
from onnx import TensorProto

from qtool.compile.backends.onnx import Rows
from qtool.compile.backends.onnx_graph import Attribute, Graph
from qtool.compile.backends.onnx_tensorrt import TensorRtOnnx
from qtool.compile.decoder import Attention

DOMAIN = "qtool"
"""Of the plugins: TensorRT's parser finds them by this and the operator's name."""


class PluginOnnx(TensorRtOnnx):
    """`TensorRtOnnx` with the plugins of `qtool.compile.kernels.tensorrt_plugin`, for GPUs of one kind."""

    def __init__(self, graph: Graph, dtype: torch.dtype, block_size: int, *, compute_capability: int) -> None:
        super().__init__(graph, dtype, block_size)
        self._plugin: dict[str, Attribute] = {
            "plugin_namespace": DOMAIN,
            "aot": 1,  # the parser's own: the kernel is compiled now, not when the engine runs
            "compute_capability": compute_capability,
        }
        self._lengths: tuple[str, str, str] | None = None
        self._trees: dict[str, str] = {}

    def attention(self, q: Rows, k: Rows, v: Rows, attention: Attention) -> Rows:
        graph, dim = self._graph, attention.head_dim
        names = [f"{kind}.{attention.layer}" for kind in ("key", "value")]
        for name, new in zip(names, (k, v), strict=True):
            self._give_out(name, new, attention)
        no_scale = graph.constant(np.ones(1, np.float32))
        queries, keys, values = (self._reshape(x.name, -1, x.features // dim, dim) for x in (q, k, v))
        inputs = [
            queries,
            keys,
            values,
            *(self._pool(name, attention) for name in names),
            self._tables,
            *self._where(),
            self._tree(attention.window),
            no_scale,
            no_scale,
        ]
        options = {
            **self._plugin,
            "num_heads": attention.num_heads,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": dim,
            "block_size": self._block_size,
            "scale": attention.scale,
            "window": attention.window or 0,
            "has_tree": 1,
        }
        parts = graph.nodes(f"{DOMAIN}::attend", inputs, 2, **options)
        mixed = graph.node(f"{DOMAIN}::merge", *parts, queries, self._tables, **options)
        rows = graph.node("Reshape", mixed, graph.node("Shape", q.name))
        graph.declare(rows, self._kind, ["B", "S", q.features])
        return Rows(rows, q.features)

    def _where(self) -> tuple[str, str, str]:
        """Past lengths [B], where each sequence starts among the B·S new tokens [B + 1], positions [B·S]."""
        if self._lengths is None:
            graph = self._graph
            first, second, one = (graph.constant(np.array(index, np.int64)) for index in (0, 1, 1))
            shape = graph.node("Shape", self._positions)
            sequences, tokens = (graph.node("Gather", shape, index, axis=0) for index in (first, second))
            end = graph.node("Add", graph.node("Mul", sequences, tokens), one)
            starts = graph.node("Cast", graph.node("Range", first, end, tokens), to=TensorProto.INT32)
            past_lens = graph.node("Gather", self._positions, first, axis=1)
            self._lengths = past_lens, starts, self._reshape(self._positions, -1)
        return self._lengths

    def _tree(self, window: int | None) -> str:
        """Which of its sequence's new tokens each new token sees, [B·S, S]."""
        mask = self._mask(window)
        if mask not in self._trees:
            graph = self._graph
            blocks = graph.node("Gather", graph.node("Shape", self._tables), graph.integers(1), axis=0)
            past = graph.node("Mul", blocks, graph.integers(self._block_size))
            end = graph.node("Gather", graph.node("Shape", mask), graph.integers(3), axis=0)
            new = graph.node("Slice", mask, past, end, graph.integers(3))
            square = graph.node("Squeeze", new, graph.integers(1))
            self._trees[mask] = self._reshape(square, -1, 0)
        return self._trees[mask]
