"""The block manager's books always balance."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qtool.runtime.blocks import BlockManager
from qtool.runtime.prefix import PrefixIndex

NUM_BLOCKS, BLOCK_SIZE = 7, 3


class BlockBooks(RuleBasedStateMachine):
    """Fills, publishes, shares and frees tables at random, and counts the blocks from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[tuple[list[int], list[int]]] = []
        """Tables and their tokens."""
        self.contents: dict[int, list[int]] = {}
        """What a block holds, written by the one that was handed it."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=NUM_BLOCKS * BLOCK_SIZE + 4))
    def new_table(self, tokens: list[int]) -> None:
        keys: list[bytes] = []
        shared = self.manager.find_prefix(tokens, keys, "")
        for place, block in enumerate(shared):
            assert self.contents[block] == tokens[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
        free = self.manager.num_free
        named = {block for table, _ in self.tables for block in table}
        needed = -(-len(tokens) // BLOCK_SIZE) - sum(block in named for block in shared)
        table: list[int] = []
        assert self.manager.grow(table, len(tokens), shared) == (needed <= free)
        if needed > free:
            assert table == []
            assert self.manager.num_free == free
            return
        assert len(table) == -(-len(tokens) // BLOCK_SIZE)
        assert table[: len(shared)] == shared
        for place in range(len(shared), len(table)):
            assert self.manager.num_references(table[place]) == 1, "a block to write to is shared"
            self.contents[table[place]] = tokens[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
        self.tables.append((table, tokens))

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if self.tables:
            table, tokens = data.draw(st.sampled_from(self.tables))
            self.manager.publish(table, tokens, [], "", range(len(tokens) // BLOCK_SIZE))

    @rule(data=st.data())
    def free_table(self, data: st.DataObject) -> None:
        if self.tables:
            table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.manager.free(table)
            assert table == []

    @invariant()
    def every_block_is_free_or_named(self) -> None:
        named = Counter(block for table, _ in self.tables for block in table)
        assert self.manager.num_free == NUM_BLOCKS - len(named)
        assert all(self.manager.num_references(block) == named[block] for block in range(NUM_BLOCKS))
        assert all(len(set(table)) == len(table) for table, _ in self.tables)


TestBlockBooks = BlockBooks.TestCase
TestBlockBooks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_blocks_are_handed_out_once_each_until_none_is_left() -> None:
    manager, table = BlockManager(5, 2), []
    assert manager.grow(table, 10)
    assert sorted(table) == [0, 1, 2, 3, 4]
    assert not manager.grow([], 1)


def filled(manager: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    """A table for tokens that are computed and published, what is known already shared."""
    table: list[int] = []
    keys: list[bytes] = []
    assert manager.grow(table, len(tokens), manager.find_prefix(tokens, keys, salt))
    manager.publish(table, tokens, keys, salt, range(len(tokens) // manager.block_size))
    return table


def test_a_shared_block_is_free_only_when_both_tables_are() -> None:
    manager = BlockManager(4, 2)
    first, second = filled(manager, [1, 2, 3, 4, 5]), filled(manager, [1, 2, 3, 4, 6])
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    manager.free(first)
    assert manager.num_free == 1
    manager.free(second)
    assert manager.num_free == 4


def test_a_freed_prefix_is_found_until_its_blocks_are_handed_out_its_end_first() -> None:
    manager = BlockManager(4, 2)
    table = filled(manager, [1, 2, 3, 4, 5, 6])
    first, second, _ = table
    manager.free(table)
    assert manager.grow(other := [], 4)  # the block without a key, then the one used longest ago
    assert manager.find_prefix([1, 2, 3, 4, 5, 6], [], "") == [first, second]
    assert manager.grow(other, 8)
    assert manager.find_prefix([1, 2, 3, 4], [], "") == []


def test_a_prefix_is_found_only_from_its_first_token_and_under_its_salt() -> None:
    manager = BlockManager(8, 2)
    table = filled(manager, [1, 2, 3, 4], salt="mine")
    assert manager.find_prefix([1, 2, 3, 4, 5], [], "mine") == table
    assert manager.find_prefix([1, 2, 3, 9], [], "mine") == table[:1]
    for tokens, salt in (
        ([3, 4], "mine"),
        ([9, 2, 3, 4], "mine"),
        ([1, 2], ""),
        ([1, 2], "theirs"),
        ([1], "mine"),
    ):
        assert manager.find_prefix(tokens, [], salt) == []


def test_a_collision_of_keys_is_a_miss() -> None:
    index = PrefixIndex()
    index.publish(3, b"key", [1, 2])
    assert index.find(b"key", [1, 2]) == 3
    assert index.find(b"key", [1, 3]) is None


def test_a_block_that_is_published_twice_keeps_its_first_place() -> None:
    manager = BlockManager(4, 2)
    first, again = [], []
    assert manager.grow(first, 2)
    assert manager.grow(again, 2)
    for table in (first, again):
        manager.publish(table, [1, 2], [], "", range(1))
    manager.free(again)
    assert manager.find_prefix([1, 2], [], "") == first
