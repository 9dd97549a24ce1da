"""Which blocks hold what was computed before, found by the tokens that lead up to them."""

from array import array
from collections.abc import Sequence
from hashlib import sha256


def extend_keys(keys: list[bytes], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Append the keys of the full blocks of `tokens` that `keys` does not hold yet.

    A key is the sha256 of its parent's key and of its own tokens, so that it stands for the whole prefix.
    The first block's parent is the salt's hash: requests with different salts share nothing, and none can
    learn from a quick answer what another one asked (CVE-2025-46570).
    """
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        parent = keys[-1] if keys else sha256(salt.encode()).digest()
        keys.append(sha256(parent + array("i", tokens[start : start + block_size]).tobytes()).digest())


class PrefixIndex:
    """Blocks by key, at most one a key, and each block's own tokens, which a hit compares."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    def find(self, key: bytes, tokens: Sequence[int]) -> int | None:
        """The block under a key, if it holds these very tokens: a collision of hashes is a miss."""
        block = self._blocks.get(key)
        if block is None or self._contents[block][1] != tuple(tokens):
            return None
        return block

    def publish(self, block: int, key: bytes, tokens: Sequence[int]) -> None:
        """Offer a block under a key; one that is offered already keeps the key."""
        if key not in self._blocks and block not in self._contents:
            self._blocks[key] = block
            self._contents[block] = (key, tuple(tokens))

    def forget(self, block: int) -> None:
        """No longer offer a block, whose contents are about to be overwritten."""
        if block in self._contents:
            key, _ = self._contents.pop(block)
            del self._blocks[key]
