"""Which free blocks are given up first, in the order in which vLLM evicts. Duck-typed: imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Generic, Protocol, TypeVar

from tuner.scheduler.decisions import Budget, Counters, overtakers, spare
from tuner.scheduler.prefixes import NOBODY, PROTECTED, PrefixTree

H = TypeVar("H", bound=Hashable)


class FreeQueue(Protocol):
    """vLLM's queue of free blocks: the head is evicted first.

    A block knows its `next_free_block` and its `_block_hash`, None while it has no content.
    """

    @property
    def fake_free_list_head(self) -> Any:
        """What stands before the first block."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are in the queue."""
        ...

    def remove(self, block: Any) -> None:
        """Take a block out."""
        ...

    def append(self, block: Any) -> None:
        """Put a block at the tail."""
        ...


LOOK_AHEAD_STEPS = 4
"""One look covers this many of the largest steps: looks are rarer the further they go."""
FEW_OF = 8
"""To ask of one block by its hash whether it is free costs no more than to walk this many (vLLM 0.32: 5 or 6)."""


class SecondChance(Generic[H]):
    """Before blocks are taken from the head, those worth keeping there go to the tail.

    It orders the queue and takes nothing out of it, so that every free block can still be had. Looking is amortised:
    a stretch at the head that was found to hold nothing worth keeping is not looked at again until it is used up.
    A block is only kept when it `is_only_copy` of its content; `is_free` says of a hash whether its block is free.
    """

    def __init__(
        self,
        queue: FreeQueue,
        counters: Counters,
        is_only_copy: Callable[[H, Any], bool],
        is_free: Callable[[H], bool],
    ) -> None:
        self._queue = queue
        self._counters = counters
        self._is_only_copy = is_only_copy
        self._is_free = is_free
        self._clear = 0
        self._free_before = 0

    def look_again(self) -> None:
        """What is worth keeping changed: forget what was found."""
        self._clear = 0

    def before_step(self, most_taken: int, *worth: Mapping[H, int], most_kept: int = 0, early: bool = False) -> None:
        """At most `most_taken` blocks will be taken: make sure that they are not those with a rank above 0.

        A block has the rank that the first of `worth` gives to its hash, and 0 when none does. A look ends after so
        many steps' worth of blocks, and goes on past as many as `most_kept` when it found too few to give up. With
        `early`, cached blocks that others make way for count as evicted early.
        """
        self._free_before = self._queue.num_free_blocks
        if self._clear >= min(most_taken, self._free_before):
            return
        self._clear = min(LOOK_AHEAD_STEPS * most_taken, self._free_before)
        if self._all_in_use(worth) or self._nothing_in(self._clear, worth):
            return
        blocks, keys, ranks = self._look(most_taken, most_kept, worth)
        moved = spare(ranks)
        self._clear = ranks.count(0)
        if not moved:
            return
        for index in moved:
            self._queue.remove(blocks[index])
            self._queue.append(blocks[index])
        self._counters.spared_blocks += len(moved)
        if early:
            self._counters.early_evictions += overtakers(ranks, [key is not None for key in keys])

    def after_step(self, *, freed_meanwhile: bool) -> None:
        """The step took what it needed; `freed_meanwhile` when it also freed blocks, which hides how many it took."""
        if freed_meanwhile:
            self._clear = 0
        else:
            self._clear = max(0, self._clear - (self._free_before - self._queue.num_free_blocks))

    def _all_in_use(self, worth: Sequence[Mapping[H, int]]) -> bool:
        """Little is worth keeping and none of it is free: to know that is cheaper than to walk."""
        few = sum(map(len, worth)) * FEW_OF <= self._clear
        return few and not any(self._is_free(key) for known in worth for key in known)

    def _nothing_in(self, count: int, worth: Sequence[Mapping[H, int]]) -> bool:
        """None of the first `count` blocks is worth keeping: so ends most looks."""
        keys: list[H | None] = []
        block = self._queue.fake_free_list_head
        for _ in range(count):
            block = block.next_free_block
            keys.append(block._block_hash)
        return all(known.keys().isdisjoint(keys) for known in worth)

    def _look(
        self, most_taken: int, most_kept: int, worth: Sequence[Mapping[H, int]]
    ) -> tuple[list[Any], list[H | None], list[int]]:
        """Blocks from the head on, their hashes and their ranks."""
        blocks: list[Any] = []
        keys: list[H | None] = []
        ranks: list[int] = []
        block = self._queue.fake_free_list_head
        stretch = LOOK_AHEAD_STEPS * most_taken
        end = min(stretch + most_kept, self._queue.num_free_blocks)
        while len(blocks) < end and ranks.count(0) < most_taken:
            start = len(blocks)
            for _ in range(min(stretch, end - start)):
                block = block.next_free_block
                blocks.append(block)
                keys.append(block._block_hash)
            ranks += [
                rank if rank and key is not None and self._is_only_copy(key, each) else 0
                for rank, key, each in zip(_ranks(keys[start:], worth), keys[start:], blocks[start:], strict=True)
            ]
        return blocks, keys, ranks


def _ranks(keys: Sequence[H | None], worth: Sequence[Mapping[H, int]]) -> Iterator[int]:
    ranks: Iterator[int] = repeat(NOBODY)
    for known in reversed(worth):
        of: Any = known.get
        ranks = map(of, keys, ranks)
    return ranks


class FreeBlocks(Generic[H]):
    """Retention and eviction under pressure: the blocks worth keeping leave the head of the free queue.

    Both at once rank a block by what is dearer of the two. Ranking costs what there is to rank, so it comes the more
    rarely the more there is.
    """

    def __init__(
        self,
        budget: Budget,
        tree: PrefixTree[H],
        queue: FreeQueue,
        counters: Counters,
        is_only_copy: Callable[[H, Any], bool],
        is_free: Callable[[H], bool],
    ) -> None:
        self._budget = budget
        self._tree = tree
        self._second_chance = SecondChance(queue, counters, is_only_copy, is_free)
        self._kept: Mapping[H, int] = {}
        self._kept_runs: dict[int, tuple[H, ...]] = {}
        self._visits_until_ranking = -1
        self._under_pressure = False

    @property
    def kept(self) -> Mapping[H, int]:
        """The blocks that retention keeps now, by their hashes."""
        return self._kept

    def visited(self) -> None:
        """The tree was visited."""
        self._visits_until_ranking -= 1

    def before_step(self, most_taken: int, usage: float) -> None:
        """At most `most_taken` free blocks will be taken; `usage` is the share of the pool in use, from 0 to 1."""
        budget = self._budget
        if budget.max_cached_blocks and self._visits_until_ranking < 0:
            self._rank(budget.max_cached_blocks)
        if budget.evict_above:
            pressure = usage > budget.evict_above
            if pressure != self._under_pressure:
                self._under_pressure = pressure
                self._second_chance.look_again()
        worth = [self._kept] if self._kept else []
        if self._under_pressure:
            worth.append(self._tree.reuse)
        if worth:
            self._second_chance.before_step(most_taken, *worth, most_kept=len(self._kept), early=self._under_pressure)

    def after_step(self, *, freed_meanwhile: bool) -> None:
        """As of SecondChance."""
        self._second_chance.after_step(freed_meanwhile=freed_meanwhile)

    def _rank(self, max_blocks: int) -> None:
        # By identity, since it is asked with each visit and hardly ever changes; held, so that no id comes twice.
        runs = {id(run): run for run in self._tree.most_shared(max_blocks)}
        if runs.keys() != self._kept_runs.keys():
            self._kept_runs = runs
            kept = dict.fromkeys(chain.from_iterable(runs.values()), PROTECTED)
            if kept != self._kept:
                self._kept = kept
                self._second_chance.look_again()
        self._visits_until_ranking = self._tree.shared_prefixes // 32
