"""What a kernel is compiled for: the attention's shape and the tile; and how a batch is spread over a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qtool.errors import UsageError

Dtype = Literal["float16", "bfloat16"]
PoolDtype = Literal["float16", "bfloat16", "int8", "float8_e4m3"]

MAX_SPLITS = 32
"""Parts that a tile's keys are cut into at most; `merge` holds as many partial results of a row at once."""
KEYS_PER_SPLIT = 256
"""Keys worth a part of their own: with fewer, writing and merging it would cost more than it saves."""
WANTED_PROGRAMS = 256
"""Programs that fill a GPU of 108 to 148 multiprocessors about twice."""


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention, apart from the batch. Each distinct spec is a kernel of its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens that a block of the pool holds."""
    scale: float
    """What query times key is multiplied by, usually head_dim ** -0.5."""
    dtype: Dtype = "float16"
    """Of queries, new keys and values, and the output. Products accumulate in float32."""
    pool_dtype: PoolDtype = "float16"
    """`dtype`, or 8-bit codes with one float32 scale a KV head."""
    window: int = 0
    """Sliding window: a query sees the keys of the last `window` positions, its own included. 0: all."""
    tree: bool = False
    """Which of a sequence's new tokens see one another is a mask's to say, within their order."""
    split: bool = False
    """Write partial results for `merge`."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.group > 32:
            raise UsageError(
                f"paged attention: {self.num_heads} query heads over {self.num_kv_heads} KV heads; "
                "it wants the same number of query heads, at most 32, for each KV head"
            )
        if not 8 <= self.head_dim <= 256 or self.head_dim % 8:
            raise UsageError(
                f"paged attention: head_dim {self.head_dim}; it wants a multiple of 8 from 8 to 256, "
                "so that rows start on 16 bytes and a tile fits shared memory"
            )
        if not self.quantized and self.pool_dtype != self.dtype:
            raise UsageError(
                f"paged attention: a {self.pool_dtype} pool under {self.dtype} queries; "
                f"it wants {self.dtype}, int8 or float8_e4m3"
            )

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def quantized(self) -> bool:
        return self.pool_dtype in ("int8", "float8_e4m3")


@dataclass(frozen=True)
class Tile:
    """The piece that one program works on, and the threads that it has."""

    rows: int
    """Query tokens times the query heads of one KV head."""
    keys: int
    num_warps: int
    num_stages: int
    """Key tiles in flight."""

    def tokens(self, spec: AttentionSpec) -> int:
        return self.rows // spec.group


MERGE_TILE = Tile(rows=1, keys=MAX_SPLITS, num_warps=4, num_stages=1)


def tiles(spec: AttentionSpec) -> tuple[Tile, Tile]:
    """The narrow tile, for decode and drafts, and the wide one, for chunks of a prompt.

    Both keep to 48 KiB of shared memory: what a launch gets on every GPU without asking for more, which the
    caller of an ahead-of-time kernel may not know to do. Within that, the narrow one has as many bytes in
    flight as fit: decode waits for memory.
    """
    rows = power_of_two(spec.group)
    if spec.head_dim > 128:
        narrow = Tile(rows, 16, num_warps=4, num_stages=2 if rows > 16 else 3)
        return narrow, Tile(32, 16, num_warps=4, num_stages=2)
    narrow = Tile(rows, 32, num_warps=4, num_stages=3)
    if spec.head_dim > 64:
        return narrow, Tile(64, 16, num_warps=8, num_stages=3)
    return narrow, Tile(64, 64, num_warps=4, num_stages=2)


def choose_tile(spec: AttentionSpec, num_tokens: int, num_sequences: int) -> Tile:
    """The wide tile once a sequence has, on average, more rows than the narrow one."""
    narrow, wide = tiles(spec)
    return wide if num_tokens * spec.group > narrow.rows * num_sequences else narrow


def grid(
    spec: AttentionSpec, tile: Tile, num_tokens: int, num_sequences: int, num_splits: int
) -> tuple[int, int, int]:
    """Programs of `attend`. TensorRT's symbolic integers do as well as numbers, here and in `num_splits`."""
    return num_tokens // tile.tokens(spec) + num_sequences, spec.num_kv_heads, num_splits


def num_splits(
    spec: AttentionSpec,
    num_tokens: int,
    num_sequences: int,
    max_blocks: int,
    wanted_programs: int = WANTED_PROGRAMS,
    least: Callable[[int, int], int] = min,
    most: Callable[[int, int], int] = max,
) -> int:
    """Parts S to cut the keys into, so that a small batch over long contexts fills a GPU.

    `max_blocks` is the width of the block tables: no length is read back from the GPU for this.
    """
    programs, kv_heads, _ = grid(spec, tiles(spec)[0], num_tokens, num_sequences, 1)
    keys = max_blocks * spec.block_size
    if spec.window:
        keys = least(keys, spec.window)
    worth = most(keys // KEYS_PER_SPLIT, 1)
    return least(least(most(wanted_programs // (programs * kv_heads), 1), worth), MAX_SPLITS)


def max_partial_rows(spec: AttentionSpec, num_tokens: int, most: Callable[[int, int], int] = max) -> int:
    """A bound on S · T that never shrinks when a batch grows, as S · T itself does.

    Where S is above 1 it is at most WANTED_PROGRAMS over the programs of one split, of which there are more
    than T over a tile's tokens for each KV head.
    """
    return most(num_tokens, WANTED_PROGRAMS * tiles(spec)[0].tokens(spec) // spec.num_kv_heads)


def constants(spec: AttentionSpec, tile: Tile) -> dict[str, int | float | bool]:
    """The compile-time arguments of `attend`."""
    return {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": spec.block_size,
        "scale": spec.scale,
        "window": spec.window,
        "has_tree": spec.tree,
        "has_scales": spec.quantized,
        "split": spec.split,
        "tile_rows": tile.rows,
        "tile_keys": tile.keys,
        "tile_dims": power_of_two(spec.head_dim),
    }


def merge_constants(head_dim: int) -> dict[str, int]:
    """The compile-time arguments of `merge`."""
    return {"head_dim": head_dim, "max_splits": MAX_SPLITS, "tile_dims": power_of_two(head_dim)}


def power_of_two(number: int) -> int:
    """The least power of two that is no less, and at least 16, the side of a tensor core's product."""
    return max(16, 1 << (number - 1).bit_length())
