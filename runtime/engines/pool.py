"""How many blocks a KV pool gets."""

from qtool.core.memory import available_memory
from qtool.errors import UsageError

DEFAULT_TOKENS = 32_768
_SHARE = 0.5


def num_blocks(kv_cache_tokens: int | None, block_size: int, bytes_per_token: int) -> int:
    """Blocks that hold at least `kv_cache_tokens` tokens.

    Without a number: 32,768 tokens, or as many as fit in half of the memory that is available now, if
    those are fewer. Raises UsageError for a number below 1.
    """
    if kv_cache_tokens is None:
        affordable = int(available_memory() * _SHARE) // bytes_per_token
        kv_cache_tokens = max(min(DEFAULT_TOKENS, affordable), 1)
    if kv_cache_tokens < 1:
        raise UsageError(f"kv_cache_tokens is {kv_cache_tokens}, wanted at least 1")
    return -(-kv_cache_tokens // block_size)
