"""The reference backend: torch, eager. Slow, obvious and right; the other backends are tested against it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import Attention, RowsOf, Weights
from qtool.compile.hidden import HiddenLayer
from qtool.compile.layers import Mixture
from qtool.compile.rope import Rope
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.kv_cache import KvCache
from qtool.core.qtensor import Linear

KV_DTYPES = {"f32": torch.float32, "f16": torch.float16}


@dataclass(frozen=True)
class Tokens:
    """The new tokens of a step, one sequence after another, as tensors on one device."""

    token_ids: Tensor
    """[T]"""
    positions: Tensor
    """[T]"""
    logit_rows: Tensor
    """[R], rows of T."""
    hidden_rows: Tensor
    """[F], rows of T."""


@dataclass(frozen=True)
class Batch(Tokens):
    """The new tokens of B sequences, and where each finds its past."""

    past_lens: Sequence[int]
    """[B]"""
    new_lens: Sequence[int]
    """[B]"""
    block_tables: Sequence[Tensor]
    """B tables of block numbers, each long enough for past and new tokens."""
    masks: Sequence[Tensor]
    """B masks [new, new], which new tokens each new token sees."""


@dataclass(frozen=True)
class Pool:
    """Keys and values of every layer, each [layers, blocks, block_size, Hkv, D]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, config: DecoderConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "Pool":
        """An empty pool."""
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))


class ResidentWeights:
    """Weights as dense numbers of one dtype on one device; each is read and dequantized at its first use."""

    def __init__(self, source: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`."""
        if name not in self._tensors:
            self._tensors[name] = self._source.tensor(name).to(self._device, self._dtype)
        return self._tensors[name]

    def linear(self, module: str) -> Linear:
        """The linear `module`, dense."""
        if module not in self._linears:
            linear = self._source.linear(module)
            bias = None if linear.bias is None else linear.bias.to(self._device, self._dtype)
            dense = linear.dense(self._dtype).to(self._device)
            self._linears[module] = Linear(dense, bias, activation=linear.activation)
        return self._linears[module]


class Dense:
    """The decoder's operations on the tokens of a step, over dense weights: all but attention."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def embed(self, table: Tensor) -> Tensor:
        return table[self._tokens.token_ids]

    def linears(self, x: Tensor, group: Sequence[Linear]) -> list[Tensor]:
        return [
            F.linear(
                x if linear.activation is None else linear.activation.fake_quantize(x),
                linear.dense(x.dtype),
                linear.bias,
            )
            for linear in group
        ]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        heads = x.view(len(x), x.shape[1] // len(weight), len(weight))
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * weight).view_as(x)

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        cos, sin = self._rotation(rope, x.dtype)
        heads, half = x.view(len(x), -1, rope.head_dim), rope.dim // 2
        first, second, rest = heads[..., :half], heads[..., half : rope.dim], heads[..., rope.dim :]
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, dim=-1).view_as(x)

    def _rotation(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, dim / 2] of the angles at the tokens' positions, taken in float32."""
        angles = self._tokens.positions[:, None].float() * self._radians(rope)
        cos, sin = ((rope.magnitude * factor)[:, None].to(dtype) for factor in (angles.cos(), angles.sin()))
        return cos, sin

    def _radians(self, rope: Rope) -> Tensor:
        """Radians a position, on the device."""
        return torch.from_numpy(rope.frequencies()).to(self._tokens.positions.device)

    def mixture(
        self, x: Tensor, logits: Tensor, mixture: Mixture, experts: Sequence[Callable[[Tensor], Tensor]]
    ) -> Tensor:
        shares, chosen = choose_experts(logits, mixture)
        output = torch.zeros_like(x)
        for index, expert in enumerate(experts):
            rows, rank = torch.where(chosen == index)
            if len(rows):
                output.index_add_(0, rows, expert(x[rows]) * shares[rows, rank, None].to(x.dtype))
        return output

    def activation(self, name: str, x: Tensor) -> Tensor:
        return _ACTIVATIONS[name](x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def take_rows(self, x: Tensor, rows: RowsOf = "logit_rows") -> Tensor:
        return x[self._tokens.logit_rows if rows == "logit_rows" else self._tokens.hidden_rows]


class Reference(Dense):
    """All operations, attention sequence by sequence; keys and values are rounded as `kv_cache` says."""

    def __init__(self, batch: Batch, pool: Pool, kv_cache: KvCache | None = None) -> None:
        super().__init__(batch)
        self._batch, self._pool, self._kv_cache = batch, pool, kv_cache

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        batch, outputs, start = self._batch, [], 0
        if self._kv_cache is not None:
            heads = (len(k), attention.num_kv_heads, attention.head_dim)
            k, v = self._kv_cache.fake_quantize(attention.layer, k.view(heads), v.view(heads))
        sequences = zip(batch.past_lens, batch.new_lens, batch.block_tables, batch.masks, strict=True)
        for past, new, table, mask in sequences:
            rows = slice(start, start + new)
            keys = self._extend(self._pool.keys[attention.layer], k[rows], past, table)
            values = self._extend(self._pool.values[attention.layer], v[rows], past, table)
            outputs.append(_attend(q[rows], keys, values, batch.positions[rows], mask, attention))
            start += new
        return torch.cat(outputs)

    @staticmethod
    def _extend(pool: Tensor, new: Tensor, past: int, table: Tensor) -> Tensor:
        """Write `new`, n tokens, after the `past` tokens of a sequence; all of it, [past + n, Hkv, D]."""
        block_size, end = pool.shape[1], past + len(new)
        slots = torch.arange(past, end, device=pool.device)
        pool[table[slots // block_size], slots % block_size] = new.view(-1, *pool.shape[2:]).to(pool.dtype)
        return pool[table[: -(-end // block_size)]].flatten(0, 1)[:end].to(new.dtype)


def choose_experts(logits: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Shares [T, chosen] in float32, and the numbers of the experts that have them.

    The first of experts with equal shares is chosen, as in every backend; transformers leaves that to
    torch.topk, whose choice depends on the number of experts and on the device.
    """
    shares, experts = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, : mixture.num_chosen], experts[:, : mixture.num_chosen]
    return shares / shares.sum(dim=-1, keepdim=True) if mixture.normalized else shares, experts


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor, attention: Attention
) -> Tensor:
    """Attention of one sequence's new tokens: q [n, H·D], keys and values [past + n, Hkv, D]."""
    past = len(keys) - len(q)
    shared = attention.num_heads // attention.num_kv_heads
    queries = q.view(len(q), attention.num_kv_heads, shared, attention.head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * attention.scale
    visible = torch.cat((mask.new_ones(len(q), past), mask), dim=1)
    if attention.window is not None:
        key_positions = torch.cat((torch.arange(past, device=q.device), positions))
        visible &= positions[:, None] - key_positions < attention.window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(len(q), -1)


def write(
    checkpoint: Checkpoint, config: DecoderConfig, folder: Path, hidden_layers: Sequence[HiddenLayer] = ()
) -> None:
    """The engine is the checkpoint itself: its files, hard-linked where the file system allows."""
    CheckpointWeights(config, checkpoint).read_all()
    for file in checkpoint.files:
        target = folder / file.name
        try:
            target.hardlink_to(file.resolve())
        except OSError:
            shutil.copyfile(file, target)
