"""The second chance at the head of the eviction queue, on a queue with the surface of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.scheduler.decisions import Budget, Counters
from tuner.scheduler.free_queue import LOOK_AHEAD_STEPS, FreeBlocks, SecondChance
from tuner.scheduler.prefixes import PrefixTree


class Block:
    def __init__(self, block_hash: bytes | None = None) -> None:
        self._block_hash = block_hash
        self.next_free_block: Block | None = None


class Queue:
    """A singly linked stand-in: slow where vLLM's is fast, with the same order."""

    def __init__(self, blocks: list[Block]) -> None:
        self.fake_free_list_head = Block()
        self._blocks = list(blocks)
        self._link()

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def blocks(self) -> list[Block]:
        return list(self._blocks)

    def remove(self, block: Block) -> None:
        self._blocks.remove(block)
        self._link()

    def append(self, block: Block) -> None:
        self._blocks.append(block)
        self._link()

    def pop(self, count: int) -> list[Block]:
        taken, self._blocks = self._blocks[:count], self._blocks[count:]
        self._link()
        return taken

    def _link(self) -> None:
        at = self.fake_free_list_head
        for block in self._blocks:
            at.next_free_block = block
            at = block
        at.next_free_block = None


KEPT = {b"kept": 1, b"dear": 2}


def second_chance(
    queue: Queue,
    counters: Counters | None = None,
    is_only_copy: Callable[[bytes, Block], bool] = lambda *_: True,
    is_free: Callable[[bytes], bool] = lambda _: True,
) -> SecondChance[bytes]:
    return SecondChance(queue, counters or Counters(), is_only_copy, is_free)


kinds = st.lists(st.sampled_from([None, b"idle", b"kept", b"dear"]), max_size=60)


@given(kinds, st.integers(1, 6), st.lists(st.integers(0, 6), max_size=20))
def test_nothing_is_lost_and_kept_blocks_go_last(kinds: list[bytes | None], most: int, takes: list[int]) -> None:
    queue = Queue([Block(kind) for kind in kinds])
    chance = second_chance(queue)
    most_kept = sum(kind in KEPT for kind in kinds)
    for take in takes:
        before = queue.blocks()
        chance.before_step(most, KEPT, most_kept=most_kept)
        assert sorted(map(id, queue.blocks())) == sorted(map(id, before))
        idle = sum(1 for block in before if block._block_hash not in KEPT)
        taken = queue.pop(min(take, most))
        assert sum(1 for block in taken if block._block_hash in KEPT) <= max(0, len(taken) - idle)
        chance.after_step(freed_meanwhile=False)


def test_blocks_of_nobody_that_come_later_go_before_those_kept_from_before() -> None:
    queue = Queue([Block(b"kept") for _ in range(8)])
    chance = second_chance(queue)
    chance.before_step(1, KEPT, most_kept=8)
    chance.after_step(freed_meanwhile=False)
    queue.append(Block(b"idle"))
    chance.before_step(1, KEPT, most_kept=8)
    assert queue.pop(1)[0]._block_hash == b"idle"


def test_a_long_run_of_kept_blocks_does_not_hide_what_is_behind_it() -> None:
    kept = [Block(b"kept") for _ in range(50)]
    queue = Queue([*kept, *(Block(b"idle") for _ in range(10))])
    second_chance(queue).before_step(1, KEPT, most_kept=50)
    assert queue.pop(1)[0]._block_hash == b"idle"


def test_where_everything_is_kept_the_cheapest_goes_first_and_equals_are_left_alone() -> None:
    queue = Queue([Block(b"dear"), Block(b"kept"), Block(b"dear")])
    second_chance(queue).before_step(3, KEPT)
    assert [block._block_hash for block in queue.blocks()] == [b"kept", b"dear", b"dear"]
    same = Queue([Block(b"kept"), Block(b"kept")])
    counters = Counters()
    second_chance(same, counters).before_step(2, KEPT)
    assert counters.spared_blocks == 0


@given(kinds)
def test_the_dearer_stays_longer_and_equals_keep_their_order(kinds: list[bytes | None]) -> None:
    blocks = [Block(kind) for kind in kinds]
    queue = Queue(blocks)
    chance = second_chance(queue)
    chance.before_step(max(1, len(blocks)), KEPT)
    assert queue.blocks() == sorted(blocks, key=lambda block: KEPT.get(block._block_hash or b"", 0))


def test_a_second_copy_is_not_kept() -> None:
    first, second = Block(b"kept"), Block(b"kept")
    queue = Queue([first, second, Block()])
    second_chance(queue, is_only_copy=lambda _, block: block is second).before_step(3, KEPT)
    assert queue.blocks()[0] is first
    assert queue.blocks()[-1] is second


class Watched(Block):
    """Counts how often it is looked at."""

    looks = 0

    @property
    def _block_hash(self) -> bytes | None:
        self.looks += 1
        return None

    @_block_hash.setter
    def _block_hash(self, _: bytes | None) -> None: ...


def test_a_clear_stretch_is_looked_at_once() -> None:
    watched = [Watched() for _ in range(40)]
    queue = Queue([*watched])
    chance = second_chance(queue)
    for _ in range(LOOK_AHEAD_STEPS - 1):
        chance.before_step(4, KEPT)
        queue.pop(4)
        chance.after_step(freed_meanwhile=False)
    assert [block.looks for block in watched] == [1] * 4 * LOOK_AHEAD_STEPS + [0] * (40 - 4 * LOOK_AHEAD_STEPS)
    chance.look_again()
    chance.before_step(4, KEPT)
    assert sum(block.looks for block in watched) == 8 * LOOK_AHEAD_STEPS


def test_while_all_that_is_worth_keeping_is_in_use_nothing_is_walked() -> None:
    watched = [Watched() for _ in range(40)]
    in_use = {b"kept"}
    chance = second_chance(Queue([*watched]), is_free=lambda key: key in KEPT and key not in in_use)
    chance.before_step(40 // LOOK_AHEAD_STEPS, {b"kept": 1})
    assert sum(block.looks for block in watched) == 0
    in_use.clear()
    chance.look_again()
    chance.before_step(40 // LOOK_AHEAD_STEPS, {b"kept": 1})
    assert sum(block.looks for block in watched) == 40


def test_where_much_is_worth_keeping_walking_is_what_finds_it() -> None:
    watched = [Watched() for _ in range(40)]
    chance = second_chance(Queue([*watched]), is_free=lambda key: pytest.fail(f"asked for {key!r}"))
    chance.before_step(40 // LOOK_AHEAD_STEPS, {bytes([each]): 1 for each in range(40)})
    assert sum(block.looks for block in watched) == 40


def test_a_step_that_freed_blocks_hides_what_it_took() -> None:
    queue = Queue([Block(b"idle") for _ in range(8)] + [Block(b"kept"), Block(b"idle")])
    chance = second_chance(queue)
    chance.before_step(2, KEPT)
    for block in queue.pop(8):
        queue.append(block)
    chance.after_step(freed_meanwhile=True)
    chance.before_step(2, KEPT)
    assert queue.blocks()[0]._block_hash == b"idle"


def test_counts_what_made_way_under_pressure_only() -> None:
    for early, expected in ((False, 0), (True, 2)):
        counters = Counters()
        queue = Queue([Block(b"idle"), Block(b"kept"), Block(b"idle"), Block(), Block(b"idle")])
        second_chance(queue, counters).before_step(5, KEPT, early=early)
        assert (counters.spared_blocks, counters.early_evictions) == (1, expected)


def given_up_in_order(budget: Budget, usage: float, visits: Sequence[str]) -> tuple[list[bytes], Counters]:
    """The free blocks of these prompts, in their order of eviction after one look, and what was counted."""
    tree: PrefixTree[bytes] = PrefixTree(1000)
    counters = Counters()
    hashes = list(dict.fromkeys("".join(visits)))
    queue = Queue([Block(each.encode()) for each in hashes])
    free = FreeBlocks(budget, tree, queue, counters, lambda *_: True, lambda _: True)
    for visit in visits:
        tree.visit([each.encode() for each in visit])
        free.visited()
    free.before_step(len(hashes), usage)
    return [block._block_hash or b"" for block in queue.blocks()], counters


# "abcd" comes back whole, in "abcde"; of "xyz" only the first block does, and that last of all.
VISITS = ("abcd", "abcde", "xyz", "xw")


@pytest.mark.parametrize(
    ("budget", "usage", "last"),
    [
        (Budget(evict_above=0.5), 0.4, ""),
        (Budget(evict_above=0.5), 0.6, "xabcd"),
        (Budget(max_cached_blocks=2), 0.6, "ax"),
        (Budget(max_cached_blocks=2, evict_above=0.5), 0.6, "bcdax"),
    ],
)
def test_what_was_reused_is_given_up_later_the_more_of_it_was(budget: Budget, usage: float, last: str) -> None:
    order, counters = given_up_in_order(budget, usage, VISITS)
    kept = [each.encode() for each in last]
    assert order[len(order) - len(kept) :] == kept
    assert counters.spared_blocks == len(last)
    assert order[: len(order) - len(kept)] == [each.encode() for each in "abcdexyzw" if each not in last]


def test_below_the_threshold_again_nothing_moves_any_more() -> None:
    tree: PrefixTree[bytes] = PrefixTree(1000)
    counters = Counters()
    queue = Queue([Block(b"a"), Block(b"b")])
    free = FreeBlocks(Budget(evict_above=0.5), tree, queue, counters, lambda *_: True, lambda _: True)
    for chain in ([b"a"], [b"a"]):
        tree.visit(chain)
        free.visited()
    for usage, first in ((0.6, b"b"), (0.4, b"b")):
        free.before_step(2, usage)
        free.after_step(freed_meanwhile=False)
        assert queue.blocks()[0]._block_hash == first
    queue.append(queue.pop(1)[0])
    free.before_step(2, 0.4)
    assert queue.blocks()[0]._block_hash == b"a"
    free.before_step(2, 0.6)
    assert queue.blocks()[0]._block_hash == b"b"
