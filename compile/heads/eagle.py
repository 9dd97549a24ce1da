"""EAGLE's network, written once over the decoder's operations: trained, run and lowered from here."""

from typing import Protocol, TypeVar

from torch import Tensor

from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import Attention, Decoded, Operations
from qtool.compile.heads.config import HeadConfig
from qtool.compile.heads.head import EMBED
from qtool.core.qtensor import Linear

T = TypeVar("T")


class DraftOperations(Operations[T], Protocol[T]):
    """What EAGLE needs beyond a decoder's operations."""

    def features(self, width: int) -> T:
        """The feature that comes with each token of the step, [T, width]."""
        ...

    def join(self, a: T, b: T) -> T:
        """The features of `a`, then those of `b`, of each row."""
        ...


class HeadWeights(Protocol):
    """Where the network finds its weights; a `Head` is one."""

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, module: str) -> Linear: ...

    def has(self, name: str) -> bool: ...


def draft(config: HeadConfig, weights: HeadWeights, ops: DraftOperations[T]) -> Decoded[T]:
    """Logits [R, draft vocabulary] of the step's logit rows, and the features [F, hidden] of its hidden rows
    that stand for the target's when the next token is drafted.

    Row i gets token i and the feature of token i - 1: the target's final hidden state, for EAGLE-3 the fused
    ones, or what this network gave of that token.
    """
    layer = config.decoder()
    tokens, features = ops.embed(weights.tensor(EMBED)), ops.features(config.hidden_size)
    if config.kind == "eagle3":
        x = _eagle3(config, layer, weights, ops, tokens, features)
    else:
        x = _eagle(layer, weights, ops, tokens, features)
    normed = _norm(layer, weights, ops, "layers.0.post_attention_layernorm", x)
    gate, up = ops.linears(normed, [weights.linear(f"layers.0.mlp.{n}_proj") for n in ("gate", "up")])
    inner = ops.multiply(ops.activation(layer.activation, gate), up)
    x = ops.add(x, ops.linears(inner, [weights.linear("layers.0.mlp.down_proj")])[0])
    hidden = ops.take_rows(x, "hidden_rows")
    output = _norm(layer, weights, ops, "norm", ops.take_rows(x))
    return Decoded(ops.linears(output, [weights.linear("lm_head")])[0], (hidden,))


def _eagle(layer: DecoderConfig, weights: HeadWeights, ops: DraftOperations[T], tokens: T, features: T) -> T:
    tokens = _norm(layer, weights, ops, "embedding_norm", tokens)
    x = ops.linears(ops.join(tokens, features), [weights.linear("fc")])[0]
    normed = _norm(layer, weights, ops, "layers.0.input_layernorm", x)
    return ops.add(x, _attention(layer, weights, ops, normed))


def _eagle3(
    config: HeadConfig,
    layer: DecoderConfig,
    weights: HeadWeights,
    ops: DraftOperations[T],
    tokens: T,
    features: T,
) -> T:
    normed = _norm(layer, weights, ops, "layers.0.hidden_norm", features)
    joined = ops.join(_norm(layer, weights, ops, "layers.0.input_layernorm", tokens), normed)
    residual = normed if config.norm_before_residual else features
    return ops.add(residual, _attention(layer, weights, ops, joined))


def _attention(layer: DecoderConfig, weights: HeadWeights, ops: DraftOperations[T], x: T) -> T:
    prefix = "layers.0.self_attn"
    q, k, v = ops.linears(x, [weights.linear(f"{prefix}.{name}_proj") for name in "qkv"])
    q, k = (ops.rope(heads, layer.ropes[0]) for heads in (q, k))
    attention = Attention(
        0, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.windows[0], layer.attention_scale
    )
    return ops.linears(ops.attention(q, k, v, attention), [weights.linear(f"{prefix}.o_proj")])[0]


def _norm(layer: DecoderConfig, weights: HeadWeights, ops: DraftOperations[T], name: str, x: T) -> T:
    """The norm of this name, which some heads of EAGLE-1 have and others don't."""
    if not weights.has(f"{name}.weight"):
        return x
    return ops.rms_norm(x, weights.tensor(f"{name}.weight"), layer.rms_norm_eps)
