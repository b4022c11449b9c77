"""vLLM's scheduler with a prefix reuse budget: applies the decisions, adds nothing to what a step may do.

Loaded by `--scheduler-cls tuner.scheduler.ReuseBudgetScheduler`, set by
`--additional-config '{"chunktune": {"max_cached_blocks": 80, ...}}'`. Without settings it is vLLM's own scheduler.
What it did goes to the log as `chunktune counters: name=value ...` when something changed: the scheduler lives in a
process that does not serve /metrics. A line comes at most every ten seconds under load and every second when the last
request leaves, so that the last line of a load is complete but for a second; nothing can be said at the very end,
because vLLM ends the scheduler after its workers, or not at all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from operator import is_
from typing import Any

import vllm
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

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
from tuner.scheduler.handles import HandleError, check_classes, check_scheduler
from tuner.scheduler.messages import started_budget
from tuner.scheduler.prefixes import PrefixTree

logger = logging.getLogger("vllm.chunktune")

COUNTERS_MARK = "chunktune counters:"
LOG_EVERY_S = 10.0
LOG_IDLE_EVERY_S = 1.0

_REMEMBERED_POOLS = 4
"""How many times the KV pool's blocks are remembered as prefixes: what came back later than that counts as new."""


class BudgetScheduler(Scheduler):
    """A scheduler of vLLM's with retention, admission, yielding, chunk merging and eviction under pressure.

    Before `_begin` it is vLLM's own.
    """

    _budget = Budget()

    def _begin(self, budget: Budget) -> None:
        """Serve with this budget from now on, knowing nothing yet."""
        self._budget = budget
        self._counters = Counters()
        self._logged = self._counters.line()
        self._logged_at_s = -LOG_EVERY_S
        self._forget_prompts()
        self._line: WaitingLine[str, bytes] = WaitingLine(budget.min_reuse_ratio, budget.max_hold_ms / 1000.0)
        self._front: Front[str] = Front()
        self._first: dict[str, Request] = {}
        # Attention with a window gives blocks up while it plans.
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._frees_in_a_step = not isinstance(spec, FullAttentionSpec)
        self._long_waiting: set[str] = set()
        self._long_admitted: dict[str, Request] = {}
        self._preferred_prefills: list[Request] = []

    def _forget_prompts(self) -> None:
        pool = self.kv_cache_manager.block_pool
        self._tree: PrefixTree[bytes] = PrefixTree(_REMEMBERED_POOLS * pool.num_gpu_blocks)
        self._eviction = FreeBlocks(
            self._budget,
            self._tree,
            pool.free_block_queue,
            self._counters,
            lambda key, block: self._cached_block(key) is block,
            self._is_free,
        )
        self._hits = HitWindow()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM does; what was counted of prompts that are cached no more is forgotten too."""
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        if done and not self._budget.off:
            self._forget_prompts()
        return done

    def add_request(self, request: Request) -> None:
        """As vLLM does, and remember the request's prefix."""
        known = request.request_id in self.requests
        super().add_request(request)
        if known or self._budget.off:
            return
        # By the keys under which the pool caches, so that no step has to make them.
        chain = [make_block_hash_with_group_id(each, 0) for each in request.block_hashes]
        shared = self._tree.visit(chain)
        self._eviction.visited()
        self._line.arrive(request.request_id, chain, 0 if request.skip_reading_prefix_cache else shared)
        if request.num_prompt_tokens > LONG_PROMPT_TOKENS:
            self._long_waiting.add(request.request_id)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """As vLLM does, and forget that they waited."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if not self._budget.off:
            for request in finished:
                self._leave(request.request_id, time.monotonic())
        return finished

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's step with the waiting, the free blocks and the chunks in the budget's order."""
        if self._budget.off:
            return super().schedule(*args, **kwargs)
        now_s = time.monotonic()
        front = self._order_waiting(now_s)
        yield_to = self._yield_to(front)
        requests = min(self.max_num_active_reqs, len(self.running) + len(self.waiting))
        most_taken = self.max_num_scheduled_tokens // self.block_size + requests
        self._eviction.before_step(most_taken, self.kv_cache_manager.block_pool.get_usage())
        config = self.scheduler_config
        configured = config.long_prefill_token_threshold
        config.long_prefill_token_threshold, merges = self._merging_threshold(configured)
        if yield_to:
            # On the instance and for this step only: a step without yielding pays nothing for it.
            self._reserve_prefill_lookahead = self._yielding(yield_to)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            config.long_prefill_token_threshold = configured
            if yield_to:
                del self._reserve_prefill_lookahead
        self._eviction.after_step(freed_meanwhile=bool(output.preempted_req_ids) or self._frees_in_a_step)
        self._account(output, front, now_s)
        if merges:
            chunk = configured or LONG_PROMPT_CHUNK
            taken = output.num_scheduled_tokens.values()
            self._counters.merged_chunks += sum([(tokens - 1) // chunk for tokens in taken if tokens > chunk])
        self._log_counters(now_s, LOG_EVERY_S)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """As vLLM does, and say what the policies did once nothing is left to do."""
        outputs: dict[int, Any] = super().update_from_output(*args, **kwargs)
        if not self.requests and not self._budget.off:
            self._log_counters(time.monotonic(), LOG_IDLE_EVERY_S)
        return outputs

    def _order_waiting(self, now_s: float) -> Front[str]:
        """Admission: those with enough of their prefix cached go first, the others keep their order."""
        if not self.waiting and self._first:
            self._front, self._first = Front(), {}
        if not self._budget.min_reuse_ratio or not self.waiting or not self._has_room():
            return Front()
        front = self._line.front(now_s, self._cached_block)
        in_place = self._first and front is self._front and all(map(is_, self.waiting, self._first.values()))
        if in_place or not front.keys:
            return front
        # Preempted and blocked ones stay at the head: vLLM resumes the former first, and steps over the latter.
        head = takewhile(lambda request: request.status != RequestStatus.WAITING, self.waiting)
        first = {request.request_id: request for request in head}
        for key in list(front.keys):
            request = self.requests.get(key)
            if request is None:
                self._leave(key, now_s)
            elif self._can_move(request):
                first[key] = request
        if list(first.values()) != list(islice(self.waiting, len(first))):
            self.waiting.remove_requests(set(first.values()))
            self.waiting.prepend_requests(reversed(first.values()))
        self._front, self._first = front, first
        return front

    def _can_move(self, request: Request) -> bool:
        """It is in vLLM's line of the waiting; a grammar that is not ready yet vLLM looks for at the head only."""
        return (
            request.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
            and request.num_computed_tokens == 0
            and request not in self.kv_holding_waiting
        )

    def _has_room(self) -> bool:
        taken = len(self.running) + self.num_waiting_for_streaming_input
        return bool(taken < self.max_num_active_reqs)

    @property
    def _cached_block(self) -> Callable[[bytes], Any]:
        # Asked for each time: to reset the cache, vLLM makes a new map.
        get: Callable[[bytes], Any] = self.kv_cache_manager.block_pool.cached_block_hash_to_block.get_one_block
        return get

    def _is_free(self, key: bytes) -> bool:
        block = self._cached_block(key)
        return block is not None and block.ref_cnt == 0

    def _yield_to(self, front: Front[str]) -> int:
        """Yielding: how many tokens each running prompt may take in this step; 0 where none has to yield."""
        budget = self._budget
        if not budget.yield_chunk_tokens or not budget.min_reuse_ratio or not self._somebody_is_let_through(front):
            return 0
        others = sum(1 for r in self.running if r.is_prefill_chunk) - len(self._preferred_prefills)
        if others <= 0:
            return 0
        self._counters.yielded_steps += 1
        return yield_threshold(budget.yield_chunk_tokens, others, self.block_size)

    def _merging_threshold(self, configured: int) -> tuple[int, bool]:
        """Merging: how many tokens of one prompt may go into this step, and whether that merges chunks."""
        if not self._budget.merge_below:
            return configured, False
        self._long_admitted = {key: r for key, r in self._long_admitted.items() if key in self.requests}
        long_prompts = bool(self._long_waiting) or any(
            r.is_prefill_chunk and r.status == RequestStatus.RUNNING for r in self._long_admitted.values()
        )
        return merging_threshold(configured, self._hits.hit_rate, self._budget.merge_below, long_prompts=long_prompts)

    def _somebody_is_let_through(self, front: Front[str]) -> bool:
        """A preferred request computes its prompt, or waits and would fit."""
        self._preferred_prefills = [
            r for r in self._preferred_prefills if r.is_prefill_chunk and r.status == RequestStatus.RUNNING
        ]
        if self._preferred_prefills:
            return True
        request = self.requests.get(front.preferred[0]) if front.preferred else None
        if request is None:
            return False
        total = len(request.block_hashes)
        cached = needed_blocks(total, self._budget.min_reuse_ratio)
        block = self._cached_block(make_block_hash_with_group_id(request.block_hashes[cached - 1], 0))
        in_use = cached if block is not None and block.ref_cnt > 0 else 0
        free: int = self.kv_cache_manager.block_pool.free_block_queue.num_free_blocks
        return total + 1 - in_use <= free

    def _yielding(self, limit: int) -> Callable[[Request, int, int], int]:
        """vLLM's last word on a request's tokens in a step, with at most `limit` for a running prompt that yields.

        Prompts with images keep their chunk: vLLM has already chosen the encoder's work for it.
        """
        vllm_s_own: Callable[[Request, int, int], int] = super()._reserve_prefill_lookahead
        preferred = self._preferred_prefills

        def reserve(request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
            if (
                num_new_tokens > limit
                and request.is_prefill_chunk
                and request.status == RequestStatus.RUNNING
                and request not in preferred
                and not request.has_encoder_inputs
            ):
                num_new_tokens = limit
            return vllm_s_own(request, num_computed_tokens, num_new_tokens)

        return reserve

    def _account(self, output: SchedulerOutput, front: Front[str], now_s: float) -> None:
        """Those admitted no longer wait; what they found in the cache tells chunk merging."""
        for admitted in output.scheduled_new_reqs:
            request = self.requests[admitted.req_id]
            if request.num_preemptions:
                continue
            self._hits.admit(admitted.num_computed_tokens, request.num_prompt_tokens)
            # Remembered only for the policies that ask again, and forget.
            if self._budget.merge_below and request.num_prompt_tokens > LONG_PROMPT_TOKENS:
                self._long_admitted[admitted.req_id] = request
            if admitted.req_id in front.preferred:
                self._counters.preferred_requests += 1
                if self._budget.yield_chunk_tokens and request.is_prefill_chunk:
                    self._preferred_prefills.append(request)
            self._leave(admitted.req_id, now_s)

    def _leave(self, request_id: str, now_s: float) -> None:
        held_s = self._line.leave(request_id, now_s)
        if held_s is not None:
            self._counters.held_requests += 1
            self._counters.hold_seconds += held_s
        self._long_waiting.discard(request_id)
        self._first.pop(request_id, None)

    def _log_counters(self, now_s: float, every_s: float) -> None:
        if now_s - self._logged_at_s < every_s:
            return
        self._logged_at_s = now_s
        line = self._counted().line()
        if line != self._logged:
            self._logged = line
            logger.info("%s %s", COUNTERS_MARK, line)

    def _counted(self) -> Counters:
        """What the policies did since `_begin`."""
        self._counters.protected_blocks = len(list(filter(self._cached_block, self._eviction.kept)))
        return self._counters


class ReuseBudgetScheduler(BudgetScheduler, AsyncScheduler):
    """AsyncScheduler with the budget of `--additional-config`, or of the environment while a search goes on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_classes(vllm.__version__, AsyncScheduler, Request, KVCacheBlock)
        super().__init__(*args, **kwargs)
        check_scheduler(self)
        budget = budget_of(self)
        check_budget(self, budget)
        self._begin(budget)
        logger.info("chunktune reuse budget: %s", budget)


def budget_of(scheduler: Scheduler) -> Budget:
    """The budget that vLLM was started with; HandleError when that is none."""
    try:
        return started_budget(scheduler.vllm_config.additional_config, os.environ)
    except ValueError as error:
        raise HandleError(f"--additional-config chunktune: {error}") from None


def check_budget(scheduler: Scheduler, budget: Budget) -> None:
    """HandleError when the options of this start do not go with the budget."""
    if not budget.off and not scheduler.cache_config.enable_prefix_caching:
        raise HandleError("prefix caching is off (--enable-prefix-caching)")
    if budget.min_reuse_ratio and scheduler.scheduler_config.policy != "fcfs":
        raise HandleError("min_reuse_ratio orders requests by arrival, and --scheduling-policy is not fcfs")
