"""The decoder, written once over the operations that a backend implements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from qtool.compile.config import DecoderConfig
from qtool.compile.rope import Rope
from qtool.core.qtensor import Linear

T = TypeVar("T")


@dataclass(frozen=True)
class Attention:
    """One layer's causal attention over the block pool; query heads share key heads evenly."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """The last positions that a token attends to, its own included; None for all."""

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.head_dim)


class Operations(Protocol[T]):
    """What a backend implements. A `T` is its handle on a matrix with a row for each new token."""

    def embed(self, table: Tensor) -> T:
        """The rows of `table` [V, hidden] for the step's token ids."""
        ...

    def linears(self, x: T, group: Sequence[Linear]) -> list[T]:
        """Each linear of `group` applied to `x`; together, so that a backend can fuse them."""
        ...

    def rms_norm(self, x: T, weight: Tensor, eps: float) -> T:
        """RMS norm of each run of len(weight) features: the whole row, or each head of it."""
        ...

    def rope(self, x: T, rope: Rope) -> T:
        """The rotary embedding of each head of `x` at the step's positions."""
        ...

    def attention(self, q: T, k: T, v: T, attention: Attention) -> T:
        """Write `k` and `v` to the pool, then attend to the sequence's past and new tokens."""
        ...

    def activation(self, name: str, x: T) -> T:
        """The activation function that config.json calls `name`."""
        ...

    def multiply(self, a: T, b: T) -> T:
        """Element by element."""
        ...

    def add(self, a: T, b: T) -> T:
        """Element by element."""
        ...

    def take_rows(self, x: T) -> T:
        """The rows whose logits the step wants."""
        ...


class Weights(Protocol):
    """Where the decoder finds its weights by name; a `Checkpoint` is one."""

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, module: str) -> Linear: ...


def decode(config: DecoderConfig, weights: Weights, ops: Operations[T]) -> T:
    """Logits [R, V] of the wanted rows. Weights are asked for layer by layer, in order."""
    table = weights.tensor(f"{EMBEDDING}.weight")
    x = ops.embed(table)
    for layer in range(config.num_layers):
        x = _attention(config, weights, ops, layer, x)
        x = _mlp(config, weights, ops, layer, x)
    x = ops.rms_norm(ops.take_rows(x), weights.tensor(f"{FINAL_NORM}.weight"), config.rms_norm_eps)
    head = Linear(table, None) if config.tied else weights.linear(HEAD)
    return ops.linears(x, [head])[0]


def _attention(config: DecoderConfig, weights: Weights, ops: Operations[T], layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}"
    normed = ops.rms_norm(x, weights.tensor(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps)
    projections = [weights.linear(f"{prefix}.self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj")]
    q, k, v = ops.linears(normed, projections)
    if config.qk_norm:
        q = ops.rms_norm(q, weights.tensor(f"{prefix}.self_attn.q_norm.weight"), config.rms_norm_eps)
        k = ops.rms_norm(k, weights.tensor(f"{prefix}.self_attn.k_norm.weight"), config.rms_norm_eps)
    q, k = ops.rope(q, config.rope), ops.rope(k, config.rope)
    attention = Attention(
        layer, config.num_heads, config.num_kv_heads, config.head_dim, config.windows[layer]
    )
    mixed = ops.attention(q, k, v, attention)
    return ops.add(x, ops.linears(mixed, [weights.linear(f"{prefix}.self_attn.o_proj")])[0])


def _mlp(config: DecoderConfig, weights: Weights, ops: Operations[T], layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}"
    normed = ops.rms_norm(x, weights.tensor(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps)
    projections = [weights.linear(f"{prefix}.mlp.{name}") for name in ("gate_proj", "up_proj")]
    gate, up = ops.linears(normed, projections)
    hidden = ops.multiply(ops.activation(config.activation, gate), up)
    return ops.add(x, ops.linears(hidden, [weights.linear(f"{prefix}.mlp.down_proj")])[0])


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of each linear, by module name, in the order of use; a tied head is not one."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(config.num_layers)
        for name, shape in layer.items()
    }
    return shapes if config.tied else {**shapes, HEAD: (config.vocab_size, hidden)}
