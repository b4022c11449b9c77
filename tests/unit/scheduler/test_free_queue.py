"""The second chance at the head of the eviction queue, on a queue with the surface of vLLM's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tuner.scheduler.decisions import Counters
from tuner.scheduler.free_queue import LOOK_AHEAD_STEPS, SecondChance


class Block:
    def __init__(self, block_hash: bytes | None = None) -> None:
        self.block_hash = block_hash
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


def only_copy(_: bytes, __: object) -> bool:
    return True


KEPT = {b"kept": 1, b"dear": 2}
kinds = st.lists(st.sampled_from([None, b"idle", b"kept", b"dear"]), max_size=60)


@given(kinds, st.integers(1, 6), st.lists(st.integers(0, 6), max_size=20))
def test_nothing_is_lost_and_kept_blocks_go_last(kinds: list[bytes | None], most: int, takes: list[int]) -> None:
    queue = Queue([Block(kind) for kind in kinds])
    chance = SecondChance(queue, Counters())
    most_kept = sum(kind in KEPT for kind in kinds)
    for take in takes:
        before = queue.blocks()
        chance.before_step(most, KEPT.get, only_copy, most_kept=most_kept)
        assert sorted(map(id, queue.blocks())) == sorted(map(id, before))
        idle = sum(1 for block in before if block.block_hash not in KEPT)
        taken = queue.pop(min(take, most))
        assert sum(1 for block in taken if block.block_hash in KEPT) <= max(0, len(taken) - idle)
        chance.after_step(freed_meanwhile=False)


def test_blocks_of_nobody_that_come_later_go_before_those_kept_from_before() -> None:
    queue = Queue([Block(b"kept") for _ in range(8)])
    chance = SecondChance(queue, Counters())
    chance.before_step(1, KEPT.get, only_copy, most_kept=8)
    chance.after_step(freed_meanwhile=False)
    queue.append(Block(b"idle"))
    chance.before_step(1, KEPT.get, only_copy, most_kept=8)
    assert queue.pop(1)[0].block_hash == b"idle"


def test_a_long_run_of_kept_blocks_does_not_hide_what_is_behind_it() -> None:
    kept = [Block(b"kept") for _ in range(50)]
    queue = Queue([*kept, *(Block(b"idle") for _ in range(10))])
    SecondChance(queue, Counters()).before_step(1, KEPT.get, only_copy, most_kept=50)
    assert queue.pop(1)[0].block_hash == b"idle"


def test_where_everything_is_kept_the_cheapest_goes_first_and_equals_are_left_alone() -> None:
    queue = Queue([Block(b"dear"), Block(b"kept"), Block(b"dear")])
    SecondChance(queue, Counters()).before_step(3, KEPT.get, only_copy)
    assert [block.block_hash for block in queue.blocks()] == [b"kept", b"dear", b"dear"]
    same = Queue([Block(b"kept"), Block(b"kept")])
    counters = Counters()
    SecondChance(same, counters).before_step(2, KEPT.get, only_copy)
    assert counters.spared_blocks == 0


@given(kinds)
def test_the_dearer_stays_longer_and_equals_keep_their_order(kinds: list[bytes | None]) -> None:
    blocks = [Block(kind) for kind in kinds]
    queue = Queue(blocks)
    chance = SecondChance(queue, Counters())
    chance.before_step(max(1, len(blocks)), KEPT.get, only_copy)
    assert queue.blocks() == sorted(blocks, key=lambda block: KEPT.get(block.block_hash or b"", 0))


def test_a_second_copy_is_not_kept() -> None:
    first, second = Block(b"kept"), Block(b"kept")
    queue = Queue([first, second, Block()])
    SecondChance(queue, Counters()).before_step(3, KEPT.get, lambda _, block: block is second)
    assert queue.blocks()[0] is first
    assert queue.blocks()[-1] is second


def test_a_clear_stretch_is_looked_at_once() -> None:
    queue = Queue([Block(b"idle") for _ in range(40)])
    chance = SecondChance(queue, Counters())
    looks: list[bytes | None] = []

    def rank(block_hash: bytes | None) -> int:
        looks.append(block_hash)
        return 0

    for _ in range(LOOK_AHEAD_STEPS - 1):
        chance.before_step(4, rank, only_copy)
        queue.pop(4)
        chance.after_step(freed_meanwhile=False)
    assert len(looks) == 4 * LOOK_AHEAD_STEPS
    chance.look_again()
    chance.before_step(4, rank, only_copy)
    assert len(looks) == 8 * LOOK_AHEAD_STEPS


def test_a_step_that_freed_blocks_hides_what_it_took() -> None:
    queue = Queue([Block(b"idle") for _ in range(8)] + [Block(b"kept"), Block(b"idle")])
    chance = SecondChance(queue, Counters())
    chance.before_step(2, KEPT.get, only_copy)
    for block in queue.pop(8):
        queue.append(block)
    chance.after_step(freed_meanwhile=True)
    chance.before_step(2, KEPT.get, only_copy)
    assert queue.blocks()[0].block_hash == b"idle"


def test_counts_what_made_way_under_pressure_only() -> None:
    for early, expected in ((False, 0), (True, 2)):
        counters = Counters()
        queue = Queue([Block(b"idle"), Block(b"kept"), Block(b"idle"), Block(), Block(b"idle")])
        SecondChance(queue, counters).before_step(5, KEPT.get, only_copy, early=early)
        assert (counters.spared_blocks, counters.early_evictions) == (1, expected)
