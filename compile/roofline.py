"""What a step has to move and to compute, and which of the two bounds it: the roofline (Williams 2009).

A floor: caches, launches and sampling come on top.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import EMBEDDING, HEAD, linear_shapes


class Frozen(BaseModel):
    """A record that is printed as a table or as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(Frozen):
    """What a machine does in a second at best."""

    bandwidth: float
    """Bytes."""
    flops: float | None
    """Floating point operations, a multiplication and an addition being two; None: not known."""
    measured: bool


class WeightBytes(Frozen):
    """Bytes of a model's weights as far as steps treat them alike."""

    table: int
    """The embedding table; steps look up rows of it, unless it is the head as well."""
    experts: int
    rest: int


class Step(Frozen):
    """The floor of one step. Times in seconds."""

    tokens: int
    bytes: float
    flops: float
    memory_time: float | None
    """None: nothing is known of the machine."""
    arithmetic_time: float | None

    @property
    def time(self) -> float | None:
        """The larger of both; None where nothing is known of the machine."""
        if self.memory_time is None:
            return None
        return max(self.memory_time, self.arithmetic_time or 0.0)

    @property
    def bound(self) -> Literal["memory", "arithmetic"] | None:
        """What takes longer; None where the arithmetic is not known."""
        if self.memory_time is None or self.arithmetic_time is None:
            return None
        return "memory" if self.memory_time >= self.arithmetic_time else "arithmetic"


def predict_step(
    config: DecoderConfig,
    weights: WeightBytes,
    kv_bytes_per_token: int,
    machine: Machine | None,
    *,
    batch: int,
    past: int,
    new: int,
) -> Step:
    """The floor of a step of `batch` sequences, each with `new` tokens after `past`, one row of logits each.

    Decoding has one new token, prefill as many as the prompt. Weights are read once, keys and values of the
    past too; those of the new tokens are written. Without a `machine` there are no times.
    """
    tokens = batch * new
    moved = weights.rest + weights.experts * _shared_experts(config, tokens)
    moved += weights.table if config.tied else 0
    kept = [min(past, window or past) for window in config.windows]
    moved += batch * kv_bytes_per_token * (sum(kept) / len(kept) + new)
    flops = tokens * 2.0 * _active_weights(config) + batch * 2.0 * config.vocab_size * config.hidden_size
    seen = sum(keep + (new + 1) / 2 for keep in kept)
    flops += tokens * 4.0 * config.num_heads * config.head_dim * seen
    return Step(
        tokens=tokens,
        bytes=moved,
        flops=flops,
        memory_time=None if machine is None else moved / machine.bandwidth,
        arithmetic_time=None if machine is None or machine.flops is None else flops / machine.flops,
    )


def _active_weights(config: DecoderConfig) -> float:
    """Weights in the layers' linears that one token is multiplied by."""
    shares = [
        1.0 if mixture is None else mixture.num_chosen / mixture.num_experts for mixture in config.mixtures
    ]
    total = 0.0
    for name, (out_features, in_features) in linear_shapes(config).items():
        if name != HEAD:
            layer = int(name.removeprefix("model.layers.").partition(".")[0])
            total += out_features * in_features * (shares[layer] if is_expert(name) else 1.0)
    return total


def _shared_experts(config: DecoderConfig, tokens: int) -> float:
    """The share of experts that a step reads, were each token's drawn evenly."""
    mixtures = [mixture for mixture in config.mixtures if mixture is not None]
    shares = [1 - (1 - mixture.num_chosen / mixture.num_experts) ** tokens for mixture in mixtures]
    return sum(shares) / len(shares) if shares else 1.0


def is_expert(name: str) -> bool:
    """Whether a tensor or linear is an expert's."""
    return ".experts." in name


def part_of(name: str) -> str:
    """The part of the model that a stored tensor belongs to."""
    if name.startswith(EMBEDDING):
        return "embeddings"
    if name.startswith(HEAD):
        return "head"
    if is_expert(name):
        return "experts"
    if ".self_attn." in name:
        return "attention"
    return "MLP" if ".mlp." in name or ".block_sparse_moe." in name else "norms"
