"""The KV cache as blocks: a pool with an eviction queue, and the hash-chained prefix cache over it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

ROOT_KEY = 0x5EED
"""The chain's start; a fixed number, so that keys are the same in every process."""


def chain_keys(tokens: Sequence[int], block_size: int, *, after: int = ROOT_KEY, start: int = 0) -> list[int]:
    """One key for each whole block of `tokens` from `start` on; a key stands for its block and all before it."""
    keys: list[int] = []
    for at in range(start, len(tokens) - block_size + 1, block_size):
        after = hash((after, tuple(tokens[at : at + block_size])))
        keys.append(after)
    return keys


class BlockPool:
    """Blocks by number. A free block keeps its contents, and its key, until it is handed out again.

    The eviction queue is vLLM's: least recently freed first, blocks without a key before all others.
    """

    def __init__(self, blocks: int, *, caching: bool) -> None:
        self.total = blocks
        self.caching = caching
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(blocks))
        self._users = [0] * blocks
        self._key_of: list[int | None] = [None] * blocks
        self._by_key: dict[int, dict[int, None]] = {}

    @property
    def free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return 1.0 - len(self._free) / self.total if self.total else 0.0

    def is_free(self, block: int) -> bool:
        return block in self._free

    def key(self, block: int) -> int | None:
        """What the block holds, None when it is in no prefix cache."""
        return self._key_of[block]

    def cached(self, key: int) -> int | None:
        """A block that holds `key`, or None."""
        holders = self._by_key.get(key)
        return next(iter(holders)) if holders else None

    def longest_prefix(self, keys: Sequence[int]) -> list[int]:
        """The blocks that hold the first keys, up to the first that none holds."""
        found: list[int] = []
        for key in keys:
            block = self.cached(key)
            if block is None:
                break
            found.append(block)
        return found

    def reuse(self, blocks: Iterable[int]) -> None:
        """One more request uses these blocks."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks from the head of the queue; what they held is forgotten. ValueError if too many."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} are free")
        taken: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self.forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """A request no longer uses these blocks, first one first; its last block is evicted first."""
        plain: list[int] = []
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if self._key_of[block] is None or not self.caching:
                plain.append(block)
            else:
                self._free[block] = None
        for block in reversed(plain):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def remember(self, block: int, key: int) -> None:
        """The block holds the tokens of `key` now (or will, when the step that was just planned has run)."""
        if self.caching and self._key_of[block] is None:
            self._key_of[block] = key
            self._by_key.setdefault(key, {})[block] = None

    def forget(self, block: int) -> None:
        """Drop the block's contents from the prefix cache."""
        key = self._key_of[block]
        if key is None:
            return
        self._key_of[block] = None
        holders = self._by_key[key]
        del holders[block]
        if not holders:
            del self._by_key[key]

    def reset(self) -> bool:
        """Forget every prefix; False, and nothing done, while requests hold blocks."""
        if len(self._free) != self.total:
            return False
        self._by_key.clear()
        self._key_of = [None] * self.total
        return True

    def queue(self) -> Iterator[int]:
        """Free blocks in the order in which they are handed out; not to be changed while it is walked."""
        return iter(self._free)

    def move_to_tail(self, blocks: Iterable[int]) -> None:
        """Put free blocks at the end of the queue, in the order given."""
        for block in blocks:
            self._free.move_to_end(block)
