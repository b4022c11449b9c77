"""The KV pool and its prefix cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tuner.sim.blocks import BlockPool, chain_keys


def test_a_key_stands_for_its_block_and_all_before_it() -> None:
    one, two = chain_keys([1, 2, 3, 4, 5, 6], 2), chain_keys([1, 2, 3, 4, 7, 8], 2)
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert chain_keys([9, 9, 3, 4], 2)[1] != one[1]


def test_a_block_that_is_not_full_has_no_key() -> None:
    assert len(chain_keys([1, 2, 3], 2)) == 1


@given(st.lists(st.integers(0, 9), min_size=4, max_size=40), st.integers(0, 5))
def test_a_chain_can_be_continued(tokens: list[int], blocks: int) -> None:
    whole = chain_keys(tokens, 2)
    blocks = min(blocks, len(whole))
    head = whole[:blocks]
    rest = chain_keys(tokens, 2, after=head[-1], start=2 * blocks) if head else whole
    assert [*head, *rest] == whole


def test_the_least_recently_freed_block_is_handed_out_first() -> None:
    pool = BlockPool(3, caching=True)
    taken = pool.take(3)
    for number, block in enumerate(taken):
        pool.remember(block, 100 + number)
    pool.give_back([taken[1]])
    pool.give_back([taken[0]])
    pool.give_back([taken[2]])
    assert pool.take(3) == [taken[1], taken[0], taken[2]]


def test_the_last_block_of_a_request_is_evicted_before_its_first() -> None:
    pool = BlockPool(3, caching=True)
    taken = pool.take(3)
    for number, block in enumerate(taken):
        pool.remember(block, 100 + number)
    pool.give_back(taken)
    assert pool.take(1) == [taken[2]]
    assert pool.cached(100) == taken[0]


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(4, caching=True)
    cached, plain = pool.take(2), pool.take(2)
    for number, block in enumerate(cached):
        pool.remember(block, 100 + number)
    pool.give_back(cached)
    pool.give_back(plain)
    assert pool.take(2) == [plain[1], plain[0]]


def test_a_free_block_is_found_until_it_is_handed_out() -> None:
    pool = BlockPool(1, caching=True)
    block = pool.take(1)[0]
    pool.remember(block, 7)
    pool.give_back([block])
    assert pool.longest_prefix([7, 8]) == [block]
    pool.take(1)
    assert pool.cached(7) is None


def test_without_caching_nothing_is_remembered() -> None:
    pool = BlockPool(1, caching=False)
    block = pool.take(1)[0]
    pool.remember(block, 7)
    assert pool.cached(7) is None


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks asked for, 1 are free"):
        BlockPool(1, caching=True).take(2)


def test_prefixes_are_forgotten_only_when_nobody_uses_them() -> None:
    pool = BlockPool(2, caching=True)
    block = pool.take(1)[0]
    pool.remember(block, 7)
    assert pool.reset() is False
    assert pool.cached(7) == block
    pool.give_back([block])
    assert pool.reset() is True
    assert pool.cached(7) is None


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of takes, shares and returns keeps the books right."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, caching=True)
        self.held: list[list[int]] = []
        self.keys = 0

    @rule(count=st.integers(1, 3), cache=st.booleans())
    def take(self, count: int, cache: bool) -> None:
        if count > self.pool.free:
            return
        blocks = self.pool.take(count)
        self.held.append(blocks)
        if cache:
            for block in blocks:
                self.keys += 1
                self.pool.remember(block, self.keys)

    @precondition(lambda self: self.keys > 0)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = self.pool.cached(data.draw(st.integers(1, self.keys)))
        if block is not None:
            self.pool.reuse([block])
            self.held.append([block])

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.pool.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def what_is_held_is_not_free(self) -> None:
        in_use = {block for blocks in self.held for block in blocks}
        assert self.pool.free == 6 - len(in_use)
        assert not any(self.pool.is_free(block) for block in in_use)
        assert self.pool.usage == pytest.approx(len(in_use) / 6)

    @invariant()
    def a_key_leads_to_a_block_that_has_it(self) -> None:
        for key in range(1, self.keys + 1):
            block = self.pool.cached(key)
            assert block is None or self.pool.key(block) == key


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
