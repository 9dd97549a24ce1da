"""Optimization profiles: the bounds of the calls that a plan serves.

A call's shapes follow from five sizes, as `compile.backends.onnx` names them: B sequences, S new tokens of
each, M blocks of past, R rows of logits and F rows of hidden states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from qtool.compile.backends.tensorrt.info import Kind
from qtool.compile.config import DecoderConfig
from qtool.core.recipe import TensorRtOptions
from qtool.errors import UsageError

Size = int | str
"""Of a dimension: a number, or the name of a size."""


class Range(NamedTuple):
    """The bounds of a size, and the value that kernels are chosen for."""

    low: int
    best: int
    high: int


@dataclass(frozen=True)
class Profile:
    """One kind of call, with the range of each size by its name."""

    kind: Kind
    sizes: Mapping[str, Range]

    def shapes(self, dimensions: Sequence[Size]) -> list[tuple[int, ...]]:
        """The least, best and largest shape of an input with these dimensions."""
        return [
            tuple(size if isinstance(size, int) else self.sizes[size][bound] for size in dimensions)
            for bound in range(3)
        ]


def check_limits(options: TensorRtOptions, config: DecoderConfig, checkpoint: Path) -> None:
    """Raise UsageError for calls that no sequence has room for, or with more logits than a tensor."""
    if (options.max_context or 0) > config.max_context:
        raise UsageError(
            f"{checkpoint}: was made for {config.max_context} positions, max_context is "
            f"{options.max_context}; take as many or fewer"
        )
    context, width = options.max_context or config.max_context, options.draft_tokens + 1
    if width > context:
        raise UsageError(
            f"{checkpoint}: draft_tokens is {options.draft_tokens}, but a sequence has {context} tokens at "
            f"most, and one of them is before its drafts; take {context - 1} or fewer"
        )
    if options.max_num_seqs * width * config.vocab_size > _MAX_ELEMENTS:
        raise UsageError(
            f"{checkpoint}: {options.max_num_seqs} sequences with draft_tokens {options.draft_tokens} have "
            f"more logits in one call than TensorRT counts in a tensor ({_MAX_ELEMENTS:,}); lower "
            "max_num_seqs or draft_tokens"
        )


def plan_profiles(options: TensorRtOptions, config: DecoderConfig, block_size: int) -> list[Profile]:
    """Profiles for chunks of prompts, for decode, and for verification unless no drafts are asked for."""
    context = min(options.max_context or config.max_context, config.max_context)
    blocks = -(-context // block_size)
    past = Range(1, max(1, blocks // 2), blocks)
    batch = Range(1, max(1, options.max_num_seqs // 2), options.max_num_seqs)
    pool = _pool_rows(config, block_size, options.max_num_seqs * blocks)
    chunk, width = min(options.chunk, context), options.draft_tokens + 1
    kinds: list[tuple[Kind, Range, Range, Range]] = [
        # A batch of two is never run. With a bound of one, Myelin cuts the fused qkv weight up and keeps its
        # parts beside the whole that the other profiles read: 1.1 MB more in each layer of SmolLM2.
        ("prefill", Range(1, 1, 2), Range(1, chunk, chunk), Range(1, 1, chunk)),
        ("decode", batch, Range(1, 1, 1), batch),
    ]
    if options.draft_tokens:
        rows = Range(1, batch.best * width, batch.high * width)
        kinds.append(("verify", batch, Range(2, width, width), rows))
    return [
        Profile(
            kind,
            {
                "B": sequences,
                "S": tokens,
                "M": past,
                "R": rows,
                "F": Range(1, chunk, chunk) if kind == "prefill" else rows,
                "P+S": Range(*(m * block_size + s for m, s in zip(past, tokens, strict=True))),
                "pool_rows": pool,
            },
        )
        for kind, sequences, tokens, rows in kinds
    ]


_MAX_ELEMENTS = 2**31 - 1
"""Of one tensor: TensorRT counts them in 32 bits."""
_POOL_SHARE = 2
"""How often the pool may hold what all sequences of a call need: the rest is for prefixes that are kept. The
plan has 8 bytes for each row that the pool may have, so the bound is no larger than it is of use."""


def _pool_rows(config: DecoderConfig, block_size: int, needed_blocks: int) -> Range:
    """Rows of a layer's pool, one a block and head."""
    heads = config.num_kv_heads
    most = _MAX_ELEMENTS // (heads * block_size * config.head_dim)
    return Range(heads, heads * min(needed_blocks, most), heads * min(_POOL_SHARE * needed_blocks, most))
