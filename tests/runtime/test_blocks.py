"""The block manager's books always balance."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from qtool.runtime.blocks import BlockManager

NUM_BLOCKS, BLOCK_SIZE = 7, 3


class BlockBooks(RuleBasedStateMachine):
    """Grows, shares and frees tables at random, and counts the blocks from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.tables: list[list[int]] = []

    @rule(num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_SIZE + 4))
    def new_table(self, num_tokens: int) -> None:
        free = self.manager.num_free
        table: list[int] = []
        fits = -(-num_tokens // BLOCK_SIZE) <= free
        assert self.manager.grow(table, num_tokens) == fits
        if fits:
            assert len(table) * BLOCK_SIZE >= num_tokens > (len(table) - 1) * BLOCK_SIZE
            self.tables.append(table)
        else:
            assert table == []
            assert self.manager.num_free == free

    @rule(data=st.data(), more=st.integers(0, 5))
    def grow_table(self, data: st.DataObject, more: int) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            before = list(table)
            grown = self.manager.grow(table, len(table) * BLOCK_SIZE + more)
            assert table[: len(before)] == before
            assert grown or table == before

    @rule(data=st.data())
    def share_table(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            shared = self.manager.share(table)
            assert shared == table
            assert shared is not table
            self.tables.append(shared)

    @rule(data=st.data())
    def free_table(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.manager.free(table)
            assert table == []

    @invariant()
    def every_block_is_free_or_named(self) -> None:
        named = Counter(block for table in self.tables for block in table)
        assert self.manager.num_free == NUM_BLOCKS - len(named)
        assert all(0 <= block < NUM_BLOCKS for block in named)
        assert all(len(set(table)) == len(table) for table in self.tables)


TestBlockBooks = BlockBooks.TestCase
TestBlockBooks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_blocks_are_handed_out_once_each_until_none_is_left() -> None:
    manager, table = BlockManager(5, 2), []
    assert manager.grow(table, 10)
    assert sorted(table) == [0, 1, 2, 3, 4]
    assert not manager.grow([], 1)


def test_a_shared_block_is_free_only_when_both_tables_are() -> None:
    manager, table = BlockManager(4, 2), []
    manager.grow(table, 5)
    shared = manager.share(table)
    manager.free(table)
    assert manager.num_free == 1
    manager.free(shared)
    assert manager.num_free == 4
