"""Which blocks of the KV pool are whose. Plain Python: it counts blocks and never touches a tensor."""

from collections import OrderedDict
from collections.abc import Sequence

from qtool.runtime.prefix import PrefixIndex, extend_keys


class BlockManager:
    """Hands out the pool's blocks to block tables, and counts how many tables name each block.

    A table is a list of block numbers that its sequence owns; the manager extends and empties it. Every
    block is either free or referenced, and the pool never grows.

    A full block whose tokens are computed can be published under a key that stands for its whole prefix. It
    keeps the key when it is free, until it is handed out again, the longest unused first; so a prefix that
    was computed before need not be computed again (vLLM's automatic prefix caching, after the block sharing
    of PagedAttention, Kwon et al. 2023, section 4.4).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """In the order in which they are handed out: those without a key, then the longest unused first."""
        self._references = [0] * num_blocks
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that no table names, those that keep a key included."""
        return len(self._free)

    def num_references(self, block: int) -> int:
        """Tables that name a block; it may be written to when that is one."""
        return self._references[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def grow(self, table: list[int], num_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Extend a table until it holds `num_tokens` tokens, first by blocks that it shares.

        False, and nothing changed, when blocks lack.
        """
        missing = self.blocks_for(num_tokens) - len(table) - len(shared)
        revived = sum(self._references[block] == 0 for block in shared)
        if missing > len(self._free) - revived:
            return False
        for block in shared:
            self._free.pop(block, None)
            self._references[block] += 1
            table.append(block)
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._index.forget(block)
            self._references[block] = 1
            table.append(block)
        return True

    def free(self, table: list[int]) -> None:
        """Empty a table, see `shrink`."""
        self.shrink(table, 0)

    def shrink(self, table: list[int], num_tokens: int) -> None:
        """Cut a table to the blocks that `num_tokens` tokens take. A block that no other table names is free
        again, the last of the table first: the end of a prefix is of use to fewer than its beginning, and of
        none without it."""
        kept = self.blocks_for(num_tokens)
        while len(table) > kept:
            block = table.pop()
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._index:
                    self._free.move_to_end(block, last=False)

    def find_prefix(self, tokens: Sequence[int], keys: list[bytes], salt: str) -> list[int]:
        """The published blocks that hold the longest run of full blocks from the first token on.

        `keys` are the keys of leading blocks as far as they are known; it is extended.
        """
        extend_keys(keys, tokens, self.block_size, salt)
        found = []
        for index, key in enumerate(keys):
            start = index * self.block_size
            block = self._index.find(key, tokens[start : start + self.block_size])
            if block is None:
                break
            found.append(block)
        return found

    def publish(
        self, table: Sequence[int], tokens: Sequence[int], keys: list[bytes], salt: str, blocks: range
    ) -> None:
        """Offer the blocks at these places of a table, full and computed, to later prefixes."""
        extend_keys(keys, tokens, self.block_size, salt)
        for place in blocks:
            start = place * self.block_size
            self._index.publish(table[place], keys[place], tokens[start : start + self.block_size])
