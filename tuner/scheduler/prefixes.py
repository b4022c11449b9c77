"""Which prompt prefixes come back: a radix tree over chained block hashes. Standard library only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)

HALF_LIFE_VISITS = 256
"""After this many further requests a visit counts half: yesterday's system prompt makes room for today's."""

_RESCALE_ABOVE = 1e200

NOBODY = 0
"""Nobody has come back for this block."""
IN_PART = 1
"""Others came back for a prefix that holds this block, and left it before a prompt's end."""
WHOLE = 2
"""A whole earlier prompt that holds this block was the beginning of a later one."""
PROTECTED = 3
"""Retention keeps this block, whatever it was reused for."""


class _Node(Generic[H]):
    """A run of blocks with the same visitors."""

    __slots__ = ("children", "depth", "ended", "parent", "run", "score", "visits", "whole")

    def __init__(self, run: tuple[H, ...], parent: _Node[H] | None, depth: int) -> None:
        self.run = run
        self.parent = parent
        self.depth = depth
        self.children: dict[H, _Node[H]] = {}
        self.visits = 0
        self.score = 0.0
        self.ended = False
        self.whole = False


class PrefixTree(Generic[H]):
    """Remembers prompts as chains of block hashes, and which parts of them several requests shared.

    A hash must stand for its block and all blocks before it (as vLLM's do): two chains that agree at a depth agree
    above it. At most about `limit_blocks` hashes are remembered; the prompts that were visited longest ago go first.
    """

    def __init__(self, limit_blocks: int) -> None:
        self._limit_blocks = max(1, limit_blocks)
        self._root: _Node[H] = _Node((), None, 0)
        self._leaves: OrderedDict[_Node[H], None] = OrderedDict()
        self._reuse: dict[H, int] = {}
        self._shared_nodes: dict[_Node[H], None] = {}
        self._weight = 1.0
        self._blocks = 0

    @property
    def blocks(self) -> int:
        """Hashes remembered now."""
        return self._blocks

    @property
    def shared_prefixes(self) -> int:
        """Runs of blocks that at least two requests had in common."""
        return len(self._shared_nodes)

    def visit(self, chain: Sequence[H]) -> int:
        """A request with this chain arrived. Returns how many of its blocks an earlier request had too."""
        self._weight *= 2 ** (1 / HALF_LIFE_VISITS)
        if self._weight > _RESCALE_ABOVE:
            self._rescale()
        node, shared = self._follow(chain)
        if shared < len(chain):
            leaf = _Node(tuple(chain[shared:]), node, shared)
            leaf.visits, leaf.score = 1, self._weight
            node.children[leaf.run[0]] = leaf
            self._leaves.pop(node, None)
            self._leaves[leaf] = None
            self._blocks += len(leaf.run)
            node = leaf
        elif node in self._leaves:
            self._leaves.move_to_end(node)
        if node is not self._root:
            node.ended = True
        while self._blocks > self._limit_blocks and len(self._leaves) > 1:
            self._forget_oldest()
        return shared

    @property
    def reuse(self) -> Mapping[H, int]:
        """IN_PART or WHOLE for each block that somebody came back for; a live view, not to be changed."""
        return self._reuse

    def most_shared(self, max_blocks: int) -> list[tuple[H, ...]]:
        """Runs of blocks that several requests shared, those with most (recent) visitors first; at most `max_blocks`.

        A block never comes without those before it, so that what is kept can be found. A run that did not change is
        the same object again, except the last when it is cut short.
        """
        runs: list[tuple[H, ...]] = []
        room = max_blocks
        for node in sorted(self._shared_nodes, key=lambda node: (-node.score, node.depth)):
            if room <= 0:
                break
            runs.append(node.run[:room])
            room -= len(runs[-1])
        return runs

    def _follow(self, chain: Sequence[H]) -> tuple[_Node[H], int]:
        """Walk down as far as the chain is known, splitting the last run where the chain leaves it."""
        node, depth, path = self._root, 0, []
        while depth < len(chain):
            child = node.children.get(chain[depth])
            if child is None:
                break
            common = _common(child.run, chain, depth)
            if common < len(child.run):
                child = self._split(child, common)
            child.visits += 1
            child.score += self._weight
            if child.visits == 2:
                self._shared_nodes[child] = None
                self._reuse.update(dict.fromkeys(child.run, IN_PART))
            depth += common
            node = child
            path.append(child)
            if child.ended:
                self._mark_whole(path)
        return node, depth

    def _mark_whole(self, path: list[_Node[H]]) -> None:
        # All above a node that is reused whole are, so what is new is at the end of the path.
        for node in reversed(path):
            if node.whole:
                break
            node.whole = True
            self._reuse.update(dict.fromkeys(node.run, WHOLE))

    def _split(self, node: _Node[H], at: int) -> _Node[H]:
        parent = node.parent
        assert parent is not None
        upper = _Node(node.run[:at], parent, node.depth)
        upper.visits, upper.score, upper.whole = node.visits, node.score, node.whole
        upper.children[node.run[at]] = node
        parent.children[upper.run[0]] = upper
        node.run, node.parent, node.depth = node.run[at:], upper, node.depth + at
        if node in self._shared_nodes:
            self._shared_nodes[upper] = None
        return upper

    def _forget_oldest(self) -> None:
        leaf, _ = self._leaves.popitem(last=False)
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.run[0]]
        self._blocks -= len(leaf.run)
        if leaf in self._shared_nodes:
            del self._shared_nodes[leaf]
            for block in leaf.run:
                del self._reuse[block]
        if not parent.children and parent is not self._root:
            self._leaves[parent] = None

    def _rescale(self) -> None:
        pending = [self._root]
        while pending:
            node = pending.pop()
            node.score /= self._weight
            pending.extend(node.children.values())
        self._weight = 1.0


def _common(run: Sequence[H], chain: Sequence[H], start: int) -> int:
    """How many blocks of `run` are those of `chain` from `start` on; the first is known to be."""
    longest = min(len(run), len(chain) - start)
    if run[longest - 1] == chain[start + longest - 1]:
        return longest
    low, high = 1, longest - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == chain[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
