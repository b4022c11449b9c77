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
        early: bool = False,
    ) -> None:
        """At most `most_taken` blocks will be taken: make sure that they are not those with a rank above 0.

        `rank` is asked with a block's hash or None; None is 0. A block with a rank is only kept when it `is_only_copy`
        of its content. With `early`, cached blocks that others make way for count as evicted early. A look ends after
        so many blocks, kept or not, so that a queue full of kept blocks costs no more than any other.
        """
        self._free_before = self._queue.num_free_blocks
        if self._clear < min(most_taken, self._free_before):
            ranks, cached = self._spare_at_head(LOOK_AHEAD_STEPS * most_taken, rank, is_only_copy)
            if early:
                self._counters.early_evictions += overtakers(ranks, cached)

    def after_step(self, *, freed_meanwhile: bool) -> None:
        """The step took what it needed; `freed_meanwhile` when it also freed blocks, which hides how many it took."""
        if freed_meanwhile:
            self._clear = 0
        else:
            self._clear = max(0, self._clear - (self._free_before - self._queue.num_free_blocks))

    def _spare_at_head(
        self,
        most_seen: int,
        rank: Callable[[bytes | None], int | None],
        is_only_copy: Callable[[bytes, FreeBlock], bool],
    ) -> tuple[list[int], list[bool]]:
        """The ranks that were found, and which of those blocks were cached."""
        seen: list[Any] = []
        block = self._queue.fake_free_list_head.next_free_block
        for _ in range(min(most_seen, self._queue.num_free_blocks)):
            seen.append(block)
            block = block.next_free_block
        ranks = [rank(each.block_hash) or 0 for each in seen]
        if not any(ranks):
            self._clear = len(seen)
            return [], []
        for index, found in enumerate(ranks):
            if found and not is_only_copy(seen[index].block_hash, seen[index]):
                ranks[index] = 0
        cached = [each.block_hash is not None for each in seen]
        moved = spare(ranks)
        for index in moved:
            self._queue.remove(seen[index])
            self._queue.append(seen[index])
        self._counters.spared_blocks += len(moved)
        self._clear = len(seen) - len(moved)
        return ranks, cached
