"""A second chance for blocks worth keeping, in the order in which vLLM evicts. Duck-typed: imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tuner.scheduler.decisions import Counters, overtakers, spare


class FreeBlock(Protocol):
    """A free block, as a link of the queue."""

    next_free_block: Any

    @property
    def block_hash(self) -> bytes | None:
        """The hash under which it is cached; None for a block without content."""
        ...


class FreeQueue(Protocol):
    """vLLM's queue of free blocks: the head is evicted first."""

    fake_free_list_head: Any
    num_free_blocks: int

    def remove(self, block: Any) -> None:
        """Take a block out."""
        ...

    def append(self, block: Any) -> None:
        """Put a block at the tail."""
        ...


LOOK_AHEAD_STEPS = 4
"""One look covers this many of the largest steps: looks are rarer the further they go."""


class SecondChance:
    """Before blocks are taken from the head, those worth keeping there go to the tail.

    It orders the queue and takes nothing out of it, so that every free block can still be had. Looking is amortised:
    a stretch at the head that was found to hold nothing worth keeping is not looked at again until it is used up.
    """

    def __init__(self, queue: FreeQueue, counters: Counters) -> None:
        self._queue = queue
        self._counters = counters
        self._clear = 0
        self._free_before = 0

    def look_again(self) -> None:
        """What is worth keeping changed: forget what was found."""
        self._clear = 0

    def before_step(
        self,
        most_taken: int,
        rank: Callable[[bytes | None], int | None],
        is_only_copy: Callable[[bytes, FreeBlock], bool],
        *,
        most_kept: int = 0,
        early: bool = False,
    ) -> None:
        """At most `most_taken` blocks will be taken: make sure that they are not those with a rank above 0.

        `rank` is asked with a block's hash or None; None is 0. A block with a rank is only kept when it `is_only_copy`
        of its content. A look ends after so many steps' worth of blocks, and goes on past as many as `most_kept` when
        it found too few to give up. With `early`, cached blocks that others make way for count as evicted early.
        """
        self._free_before = self._queue.num_free_blocks
        if self._clear >= min(most_taken, self._free_before):
            return
        seen, ranks = self._look(most_taken, most_kept, rank, is_only_copy)
        moved = spare(ranks)
        self._clear = ranks.count(0)
        if not moved:
            return
        for index in moved:
            self._queue.remove(seen[index])
            self._queue.append(seen[index])
        self._counters.spared_blocks += len(moved)
        if early:
            self._counters.early_evictions += overtakers(ranks, [each.block_hash is not None for each in seen])

    def after_step(self, *, freed_meanwhile: bool) -> None:
        """The step took what it needed; `freed_meanwhile` when it also freed blocks, which hides how many it took."""
        if freed_meanwhile:
            self._clear = 0
        else:
            self._clear = max(0, self._clear - (self._free_before - self._queue.num_free_blocks))

    def _look(
        self,
        most_taken: int,
        most_kept: int,
        rank: Callable[[bytes | None], int | None],
        is_only_copy: Callable[[bytes, FreeBlock], bool],
    ) -> tuple[list[Any], list[int]]:
        """Blocks from the head on, and their ranks."""
        seen: list[Any] = []
        ranks: list[int] = []
        block = self._queue.fake_free_list_head.next_free_block
        stretch = LOOK_AHEAD_STEPS * most_taken
        end = min(stretch + most_kept, self._queue.num_free_blocks)
        while len(seen) < end and ranks.count(0) < most_taken:
            start = len(seen)
            for _ in range(min(stretch, end - start)):
                seen.append(block)
                block = block.next_free_block
            found = [rank(each.block_hash) or 0 for each in seen[start:]]
            if any(found):
                found = [
                    value if value and is_only_copy(each.block_hash, each) else 0
                    for value, each in zip(found, seen[start:], strict=True)
                ]
            ranks += found
        return seen, ranks
