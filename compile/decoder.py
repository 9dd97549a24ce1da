"""The decoder, written once over the operations that a backend implements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

from torch import Tensor

from qtool.compile.config import DecoderConfig
from qtool.compile.hidden import FINAL, HiddenLayer
from qtool.compile.layers import Mixture
from qtool.compile.rope import Rope
from qtool.core.qtensor import Linear

T = TypeVar("T")

RowsOf = Literal["logit_rows", "hidden_rows"]
"""The rows of a step whose logits, or whose hidden states, are wanted."""


@dataclass(frozen=True)
class Attention:
    """One layer's causal attention over the block pool; query heads share key heads evenly."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """The last positions that a token attends to, its own included; None for all."""
    scale: float
    """What the products of queries and keys are multiplied by."""


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

    def mixture(self, x: T, logits: T, mixture: Mixture, experts: Sequence[Callable[[T], T]]) -> T:
        """What the chosen experts make of each row, times their shares, summed.

        `logits` are the router's, a row for each of x with one for each expert. An expert takes any
        selection of rows; one that no row has chosen need not be asked.
        """
        ...

    def activation(self, name: str, x: T) -> T:
        """The activation function that config.json calls `name`."""
        ...

    def scale(self, x: T, factor: float) -> T:
        """Every element multiplied by `factor`."""
        ...

    def multiply(self, a: T, b: T) -> T:
        """Element by element."""
        ...

    def add(self, a: T, b: T) -> T:
        """Element by element."""
        ...

    def take_rows(self, x: T, rows: RowsOf = "logit_rows") -> T:
        """The rows that the step wants."""
        ...


class Weights(Protocol):
    """Where the decoder finds its weights by name; a `Checkpoint` is one."""

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, module: str) -> Linear: ...


@dataclass(frozen=True)
class Decoded(Generic[T]):
    """What the decoder gives of a step."""

    logits: T
    """[R, V], of the step's logit rows."""
    hidden: tuple[T, ...]
    """Of each hidden layer that was asked for, in that order: [F, hidden], of the step's hidden rows."""


def decode(
    config: DecoderConfig, weights: Weights, ops: Operations[T], hidden_layers: Sequence[HiddenLayer] = ()
) -> Decoded[T]:
    """Logits and hidden states of the wanted rows. Weights are asked for layer by layer, in order."""
    table = weights.tensor(f"{EMBEDDING}.weight")
    x = ops.embed(table)
    if config.embedding_scale != 1:
        x = ops.scale(x, config.embedding_scale)
    hidden: dict[HiddenLayer, T] = {}
    for layer in range(config.num_layers):
        if layer in hidden_layers:
            hidden[layer] = ops.take_rows(x, "hidden_rows")
        x = _attention(config, weights, ops, layer, x)
        x = _mlp(config, weights, ops, layer, x)
    if FINAL in hidden_layers:
        hidden[FINAL] = _norm(config, weights, ops, FINAL_NORM, ops.take_rows(x, "hidden_rows"))
    x = _norm(config, weights, ops, FINAL_NORM, ops.take_rows(x))
    head = Linear(table, None) if config.tied else weights.linear(HEAD)
    return Decoded(ops.linears(x, [head])[0], tuple(hidden[layer] for layer in hidden_layers))


def _attention(config: DecoderConfig, weights: Weights, ops: Operations[T], layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}"
    normed = _norm(config, weights, ops, f"{prefix}.input_layernorm", x)
    projections = [weights.linear(f"{prefix}.self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj")]
    q, k, v = ops.linears(normed, projections)
    if config.qk_norm:
        q = _norm(config, weights, ops, f"{prefix}.self_attn.q_norm", q)
        k = _norm(config, weights, ops, f"{prefix}.self_attn.k_norm", k)
    q, k = (ops.rope(heads, config.ropes[layer]) for heads in (q, k))
    attention = Attention(
        layer,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.windows[layer],
        config.attention_scale,
    )
    mixed = ops.attention(q, k, v, attention)
    update = ops.linears(mixed, [weights.linear(f"{prefix}.self_attn.o_proj")])[0]
    if config.post_norms:
        update = _norm(config, weights, ops, f"{prefix}.post_attention_layernorm", update)
    return ops.add(x, update)


def _mlp(config: DecoderConfig, weights: Weights, ops: Operations[T], layer: int, x: T) -> T:
    prefix = f"model.layers.{layer}"
    norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    normed = _norm(config, weights, ops, f"{prefix}.{norm}", x)
    mixture = config.mixtures[layer]
    if mixture is None:
        update = _gated(config, weights, ops, f"{prefix}.mlp", normed)
    else:
        logits = ops.linears(normed, [weights.linear(f"{prefix}.mlp.gate")])[0]
        names = [f"{prefix}.mlp.experts.{index}" for index in range(mixture.num_experts)]
        experts = [partial(_gated, config, weights, ops, name) for name in names]
        update = ops.mixture(normed, logits, mixture, experts)
    if config.post_norms:
        update = _norm(config, weights, ops, f"{prefix}.post_feedforward_layernorm", update)
    return ops.add(x, update)


def _gated(config: DecoderConfig, weights: Weights, ops: Operations[T], prefix: str, x: T) -> T:
    gate, up = ops.linears(x, [weights.linear(f"{prefix}.{name}") for name in ("gate_proj", "up_proj")])
    hidden = ops.multiply(ops.activation(config.activation, gate), up)
    return ops.linears(hidden, [weights.linear(f"{prefix}.down_proj")])[0]


def _norm(config: DecoderConfig, weights: Weights, ops: Operations[T], name: str, x: T) -> T:
    return ops.rms_norm(x, weights.tensor(f"{name}.weight"), config.rms_norm_eps)


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def linear_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of each linear, by module name, in the order of use; a tied head is not one."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, int]] = {}
    for layer, mixture in enumerate(config.mixtures):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (queries, hidden),
            f"{prefix}.self_attn.k_proj": (keys, hidden),
            f"{prefix}.self_attn.v_proj": (keys, hidden),
            f"{prefix}.self_attn.o_proj": (hidden, queries),
        }
        if mixture is None:
            shapes |= _mlp_shapes(f"{prefix}.mlp", hidden, config.intermediate_size)
            continue
        shapes[f"{prefix}.mlp.gate"] = mixture.num_experts, hidden
        for expert in range(mixture.num_experts):
            shapes |= _mlp_shapes(f"{prefix}.mlp.experts.{expert}", hidden, mixture.intermediate_size)
    return shapes if config.tied else {**shapes, HEAD: (config.vocab_size, hidden)}


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}.gate_proj": (inner, hidden),
        f"{prefix}.up_proj": (inner, hidden),
        f"{prefix}.down_proj": (hidden, inner),
    }
