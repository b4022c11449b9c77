"""The reuse budget in the simulated engine: the plug-in's decisions, applied to `Core` as the plug-in does to vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile

from tuner.scheduler.decisions import (
    LONG_PROMPT_CHUNK,
    LONG_PROMPT_TOKENS,
    Budget,
    Counters,
    Front,
    HitWindow,
    WaitingLine,
    merging_threshold,
    needed_blocks,
    yield_threshold,
)
from tuner.scheduler.free_queue import FreeBlocks
from tuner.scheduler.prefixes import PrefixTree
from tuner.sim.blocks import BlockPool
from tuner.sim.core import Core, Request, Step

_REMEMBERED_POOLS = 4


class BudgetPolicy:
    """Retention, admission, yielding, chunk merging and eviction under pressure; a `Policy` of `Core`."""

    def __init__(self, budget: Budget, total_blocks: int) -> None:
        self.counters = Counters()
        self._budget = budget
        self._total_blocks = total_blocks
        self.cache_was_reset()
        self._line: WaitingLine[str, int] = WaitingLine(budget.min_reuse_ratio, budget.max_hold_ms / 1000.0)
        self._waiting: dict[str, Request] = {}
        self._long_waiting: set[str] = set()
        self._front: Front[str] = Front()
        self._preferred_prefills: list[Request] = []
        self._running_limit = 0
        self._threshold = 0
        self._merges = False

    def cache_was_reset(self) -> None:
        self._tree: PrefixTree[int] = PrefixTree(_REMEMBERED_POOLS * self._total_blocks)
        self._hits = HitWindow()
        self._eviction: FreeBlocks[int] | None = None

    def arrived(self, request: Request, now_s: float) -> None:
        shared = self._tree.visit(request.keys)
        if self._eviction is not None:
            self._eviction.visited()
        self._line.arrive(request.id, request.keys, shared)
        self._waiting[request.id] = request
        if request.prompt_tokens > LONG_PROMPT_TOKENS:
            self._long_waiting.add(request.id)

    def left(self, request: Request, now_s: float) -> None:
        if self._waiting.pop(request.id, None) is None:
            return
        held_s = self._line.leave(request.id, now_s)
        if held_s is not None:
            self.counters.held_requests += 1
            self.counters.hold_seconds += held_s
        self._long_waiting.discard(request.id)

    def before_step(self, core: Core, now_s: float) -> None:
        self._front = self._order_waiting(core, now_s)
        self._choose_chunk(core)
        self._order_free_blocks(core)

    def threshold(self, configured: int) -> int:
        return self._threshold

    def running_limit(self, request: Request, tokens: int) -> int:
        yields = self._running_limit and request.in_chunks and request not in self._preferred_prefills
        return min(tokens, self._running_limit) if yields else tokens

    def admitted(self, request: Request, cached_tokens: int) -> None:
        self._hits.admit(cached_tokens, request.prompt_tokens)
        if request.id in self._front.preferred:
            self.counters.preferred_requests += 1
            if self._budget.yield_chunk_tokens:
                self._preferred_prefills.append(request)

    def after_step(self, core: Core, step: Step | None, preempted: int) -> None:
        if self._eviction is not None:
            self._eviction.after_step(freed_meanwhile=preempted > 0)
            kept = self._eviction.kept
            self.counters.protected_blocks = sum(1 for key in kept if core.pool.cached(key) is not None)
        if self._merges and step is not None:
            chunk = core.config.long_prefill_token_threshold or LONG_PROMPT_CHUNK
            self.counters.merged_chunks += sum((part.tokens - 1) // chunk for part in step.parts)

    def _order_waiting(self, core: Core, now_s: float) -> Front[str]:
        if not self._budget.min_reuse_ratio or not core.waiting or not core.has_room:
            return Front()
        front = self._line.front(now_s, lambda key: core.pool.cached(key) is not None)
        if not front.keys:
            return front
        first = list(takewhile(lambda request: request.preemptions > 0, core.waiting))
        first += [self._waiting[key] for key in front.keys if key in self._waiting]
        if first != list(islice(core.waiting, len(first))):
            ahead = {request.id for request in first}
            rest = [request for request in core.waiting if request.id not in ahead]
            core.waiting.clear()
            core.waiting.extend([*first, *rest])
        return front

    def _choose_chunk(self, core: Core) -> None:
        budget = self._budget
        configured = core.config.long_prefill_token_threshold
        self._running_limit = 0
        if budget.yield_chunk_tokens and budget.min_reuse_ratio and self._somebody_is_let_through(core):
            prefills = [r for r in core.running if r.in_chunks and r not in self._preferred_prefills]
            if prefills:
                block = core.config.block_size
                self._running_limit = yield_threshold(budget.yield_chunk_tokens, len(prefills), block)
                self.counters.yielded_steps += 1
        self._threshold, self._merges = configured, False
        if budget.merge_below:
            long_prompts = bool(self._long_waiting) or any(
                r.in_chunks and r.prompt_tokens > LONG_PROMPT_TOKENS for r in core.running
            )
            self._threshold, self._merges = merging_threshold(
                configured, self._hits.hit_rate, budget.merge_below, long_prompts=long_prompts
            )

    def _somebody_is_let_through(self, core: Core) -> bool:
        """A preferred request computes its prompt, or waits and would fit."""
        self._preferred_prefills = [r for r in self._preferred_prefills if r.in_chunks and r in core.running]
        if self._preferred_prefills:
            return True
        request = self._waiting.get(self._front.preferred[0]) if self._front.preferred else None
        if request is None:
            return False
        total = len(request.keys)
        cached = needed_blocks(total, self._budget.min_reuse_ratio)
        block = core.pool.cached(request.keys[cached - 1])
        in_use = cached if block is not None and not core.pool.is_free(block) else 0
        return total + 1 - in_use <= core.pool.free

    def _order_free_blocks(self, core: Core) -> None:
        if self._eviction is None:
            self._eviction = FreeBlocks(
                self._budget,
                self._tree,
                _FreeQueue(core.pool),
                self.counters,
                lambda key, link: core.pool.cached(key) == link.block,
                lambda key: (block := core.pool.cached(key)) is not None and core.pool.is_free(block),
            )
        requests = min(core.slots, len(core.running) + len(core.waiting))
        self._eviction.before_step(core.step_tokens // core.config.block_size + requests, core.pool.usage)


class _Link:
    """A free block, as `FreeBlocks` walks them."""

    __slots__ = ("_block_hash", "_following", "block")

    def __init__(self, block: int, key: int | None, following: Iterator[_Link]) -> None:
        self.block = block
        self._block_hash = key
        self._following = following

    @property
    def next_free_block(self) -> _Link | None:
        return next(self._following, None)


class _FreeQueue:
    """The pool's eviction queue under the names of vLLM's; walked once, from the head on."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        return self._pool.free

    @property
    def fake_free_list_head(self) -> _Link:
        def links() -> Iterator[_Link]:
            for block in self._pool.queue():
                yield _Link(block, self._pool.key(block), following)

        following = links()
        return _Link(-1, None, following)

    def remove(self, link: _Link) -> None:
        """Nothing: `append` moves it."""

    def append(self, link: _Link) -> None:
        self._pool.move_to_tail([link.block])
