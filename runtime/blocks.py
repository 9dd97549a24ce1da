"""Which blocks of the KV pool are whose. Plain Python: it counts blocks and never touches a tensor."""

from collections import deque
from collections.abc import Sequence


class BlockManager:
    """Hands out the pool's blocks to block tables, and counts how many tables name each block.

    A table is a list of block numbers that its sequence owns; the manager extends and empties it. Every
    block is either free or referenced, and the pool never grows.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend a table until it holds `num_tokens` tokens. False, and nothing changed, when blocks lack."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.popleft()
            self._references[block] = 1
            table.append(block)
        return True

    def share(self, table: Sequence[int]) -> list[int]:
        """A second table over the same blocks, whose tokens must not be written to while shared."""
        for block in table:
            self._references[block] += 1
        return list(table)

    def free(self, table: list[int]) -> None:
        """Empty a table. A block that no other table names is free again, the last of the table first."""
        while table:
            block = table.pop()
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
