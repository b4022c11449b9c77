"""vLLM V1's scheduling rules on a clock of nobody: `plan` a step, `finish` it later.

Rules read off `vllm/v1/core/sched/scheduler.py` and `kv_cache_manager.py` of 0.32.0: running requests before
waiting ones, one token budget a step, the long-prefill threshold lifted for a lone request, whole prompts must
fit before they are admitted, the last token of a prompt is always computed, blocks are findable by the step that
plans them, the youngest running request gives way when blocks run out. A step may be planned while the one before
it runs (async scheduling): its decodes count on tokens that are not there yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from tuner.sim.blocks import ROOT_KEY, BlockPool, chain_keys
from tuner.sim.cost import StepShape
from tuner.sim.request import FinishReason, Part, Request, SchedulerConfig, Step, Token, Totals

__all__ = ["Core", "Policy", "Request", "SchedulerConfig", "Step", "StockPolicy", "Token"]


class Policy(Protocol):
    """A scheduler plug-in's hooks; `StockPolicy` does nothing."""

    def arrived(self, request: Request, now_s: float) -> None:
        """A new request waits (a preempted one does not arrive again)."""
        ...

    def left(self, request: Request, now_s: float) -> None:
        """No longer waiting: admitted or cancelled."""
        ...

    def before_step(self, core: Core, now_s: float) -> None:
        """May reorder `core.waiting` and the eviction queue."""
        ...

    def threshold(self, configured: int) -> int:
        """Most tokens this step takes of one prompt while others are there; 0: no limit of its own."""
        ...

    def running_limit(self, request: Request, tokens: int) -> int:
        """At most `tokens`: how many a running request may have in this step; at least 1."""
        ...

    def admitted(self, request: Request, cached_tokens: int) -> None:
        """Starts to run for the first time."""
        ...

    def after_step(self, core: Core, step: Step | None, preempted: int) -> None:
        """The step is planned; `preempted` requests gave way in it."""
        ...

    def cache_was_reset(self) -> None:
        """Nothing is cached any more."""
        ...


class StockPolicy:
    """vLLM's own scheduler."""

    def arrived(self, request: Request, now_s: float) -> None: ...

    def left(self, request: Request, now_s: float) -> None: ...

    def before_step(self, core: Core, now_s: float) -> None: ...

    def threshold(self, configured: int) -> int:
        return configured

    def running_limit(self, request: Request, tokens: int) -> int:
        return tokens

    def admitted(self, request: Request, cached_tokens: int) -> None: ...

    def after_step(self, core: Core, step: Step | None, preempted: int) -> None: ...

    def cache_was_reset(self) -> None: ...


class Core:
    """The scheduler. `add` and `abort` requests, `plan` a step, `finish` steps in the order planned."""

    def __init__(self, config: SchedulerConfig, policy: Policy | None = None, *, vocabulary: int = 900) -> None:
        # vLLM keeps one block back as the null block.
        self.pool = BlockPool(max(config.num_blocks - 1, 0), caching=config.enable_prefix_caching)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.totals = Totals()
        self.policy: Policy = policy or StockPolicy()
        self._vocabulary = vocabulary
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Run these options from the next step on; the pool stays as it is."""
        self.config = config
        self._watermark = int(config.watermark * config.num_blocks)
        self.slots = config.max_num_active_seqs or config.max_num_seqs
        """Requests that may run at a time."""
        self.step_tokens = min(
            config.max_num_scheduled_tokens or config.max_num_batched_tokens, config.max_num_batched_tokens
        )
        """Tokens that a step may compute."""

    @property
    def has_room(self) -> bool:
        """Whether a waiting request would find a place among the running ones."""
        return len(self.running) < self.slots

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """A request arrives."""
        if self.config.enable_prefix_caching:
            request.keys = chain_keys(request.tokens, self.config.block_size)
        self.waiting.append(request)
        self.policy.arrived(request, request.arrived_s)

    def abort(self, request: Request, now_s: float) -> None:
        """The client is gone; its blocks are free at once."""
        if request.finished is None:
            self._end(request, "abort", now_s)

    def plan(self, now_s: float) -> Step | None:
        """The next step, or None when nothing can run now."""
        self.policy.before_step(self, now_s)
        budget = self.step_tokens
        threshold = self._threshold()
        parts: list[Part] = []
        budget, preempted = self._plan_running(parts, budget, threshold)
        if not preempted:
            self._plan_waiting(parts, budget, threshold, now_s)
        step = Step(parts, _shape(parts)) if parts else None
        self.policy.after_step(self, step, preempted)
        if step is None:
            return None
        for part in parts:
            request = part.request
            if request.computed < request.prompt_tokens and request.preemptions == 0:
                self.totals.prefill_chunks += 1
            request.in_chunks = not part.samples
            request.computed += part.tokens
            request.in_flight += 1
            if part.samples:
                request.pending += 1
        self.totals.all_steps += 1
        return step

    def finish(self, step: Step, now_s: float) -> list[Token]:
        """The step has run: its tokens, and requests that end with them."""
        tokens: list[Token] = []
        prompt_tokens = 0
        for part in step.parts:
            request = part.request
            request.in_flight -= 1
            stale = request.preemptions != part.life
            if stale:
                request.stale -= 1
            if not part.samples or request.finished is not None:
                continue
            if not stale:
                request.pending -= 1
            token = self._next_token(request)
            request.tokens.append(token)
            number = request.output_tokens
            if number == 1:
                request.first_token_s = now_s
                prompt_tokens += request.prompt_tokens
                self.totals.prefills += 1
                self.totals.prompt_tokens += request.prompt_tokens
                self.totals.cached_tokens += request.cached_tokens or 0
            request.last_token_s = now_s
            if not stale:
                self._remember_blocks(request, request.computed - request.pending)
            if request.stop_after is not None and request.output_tokens >= request.stop_after:
                self._end(request, "stop", now_s)
            elif request.output_tokens >= request.max_tokens or len(request.tokens) >= self.config.max_model_len:
                self._end(request, "length", now_s)
            # Read through a call: `_end` has set it, which the type checker cannot know.
            tokens.append(Token(request, token, number, _reason(request)))
        self.totals.generated_tokens += len(tokens)
        if tokens:
            self.totals.steps += 1
            self.totals.step_tokens += prompt_tokens + len(tokens)
        return tokens

    def reset_prefix_cache(self) -> bool:
        """True when every prefix was forgotten; False while requests run."""
        done = self.pool.reset()
        if done:
            self.policy.cache_was_reset()
        return done

    # --- a step's two halves -------------------------------------------------------------------------------------

    def _threshold(self) -> int:
        count = len(self.running) + len(self.waiting)
        configured = self.policy.threshold(self.config.long_prefill_token_threshold)
        if count <= 1 or configured <= 0:
            return 0
        if self.config.long_prefill_token_threshold_adaptive:
            return max(configured, self.config.max_num_batched_tokens // count)
        return configured

    def _plan_running(self, parts: list[Part], budget: int, threshold: int) -> tuple[int, int]:
        preempted = 0
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            # A step whose token cannot come, because the ones under way are the last, is not planned.
            limit = min(request.prompt_tokens + request.max_tokens, self.config.max_model_len)
            known = len(request.tokens) + request.pending
            if request.pending and known >= limit:
                continue
            new = known - request.computed
            if 0 < threshold < new:
                new = threshold
            new = min(new, budget, self.config.max_model_len - 1 - request.computed)
            if new <= 0:
                continue
            new = self.policy.running_limit(request, new)
            while not self._grow(request, request.computed + new):
                victim = self.running.pop()
                self._preempt(victim)
                preempted += 1
                if victim is request:
                    return budget, preempted
            parts.append(self._part(request, new))
            budget -= new
        return budget, preempted

    def _plan_waiting(self, parts: list[Part], budget: int, threshold: int, now_s: float) -> None:
        skipped: list[Request] = []
        while self.waiting and budget > 0 and self.has_room:
            request = self.waiting[0]
            if request.stale:
                skipped.append(self.waiting.popleft())
                continue
            hits = self._cached_prefix(request)
            cached = len(hits) * self.config.block_size
            new = len(request.tokens) - cached
            if 0 < threshold < new:
                new = threshold
            if not self.config.enable_chunked_prefill and new > budget:
                break
            new = min(new, budget)
            if not self._admit_blocks(request, hits, cached + new):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.computed = cached
            if request.preemptions == 0:
                self.totals.prefix_queries += len(request.tokens) if self.config.enable_prefix_caching else 0
                self.totals.prefix_hits += cached
                request.cached_tokens = cached
                request.admitted_s = now_s
                self.policy.admitted(request, cached)
            self.policy.left(request, now_s)
            parts.append(self._part(request, new))
            self._remember_blocks(request, cached + new)
            budget -= new
        self.waiting.extendleft(reversed(skipped))

    def _part(self, request: Request, new: int) -> Part:
        known = len(request.tokens) + request.pending
        return Part(request, new, request.computed, request.computed + new >= known, request.preemptions)

    # --- blocks --------------------------------------------------------------------------------------------------

    def _cached_prefix(self, request: Request) -> list[int]:
        if not self.config.enable_prefix_caching:
            return []
        usable = (len(request.tokens) - 1) // self.config.block_size
        return self.pool.longest_prefix(request.keys[:usable])

    def _grow(self, request: Request, tokens: int) -> bool:
        """Room for the first `tokens` tokens of a running request; False when there is none."""
        missing = self._blocks_for(tokens) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks.extend(self.pool.take(missing))
        self._remember_blocks(request, tokens)
        return True

    def _admit_blocks(self, request: Request, hits: list[int], tokens: int) -> bool:
        idle_hits = sum(1 for block in hits if self.pool.is_free(block))
        watermark = self._watermark if self.running else 0
        whole = len(request.tokens) if self.config.scheduler_reserve_full_isl else tokens
        for size in (whole, tokens):
            if self._blocks_for(size) - len(hits) + idle_hits + watermark > self.pool.free:
                return False
        self.pool.reuse(hits)
        request.blocks = [*hits, *self.pool.take(self._blocks_for(tokens) - len(hits))]
        request.remembered = len(hits)
        return True

    def _remember_blocks(self, request: Request, tokens: int) -> None:
        if not self.config.enable_prefix_caching:
            return
        size = self.config.block_size
        whole = min(tokens, len(request.tokens)) // size
        if len(request.keys) < whole:
            done = len(request.keys)
            after = request.keys[-1] if done else ROOT_KEY
            request.keys.extend(chain_keys(request.tokens[: whole * size], size, after=after, start=done * size))
        for index in range(request.remembered, min(whole, len(request.blocks))):
            self.pool.remember(request.blocks[index], request.keys[index])
            request.remembered = index + 1

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []
        request.remembered = 0

    # --- endings -------------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.stale = request.in_flight
        request.pending = 0
        request.computed = 0
        request.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, reason: FinishReason, now_s: float) -> None:
        request.finished = reason
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.policy.left(request, now_s)
        self._release(request)

    def _next_token(self, request: Request) -> int:
        """A token that looks random and is the same for the same text so far; never a special one."""
        return 3 + hash((request.tokens[-1], len(request.tokens), request.tokens[0])) % (self._vocabulary - 3)


def _reason(request: Request) -> FinishReason | None:
    return request.finished


def _shape(parts: Iterable[Part]) -> StepShape:
    """One token of a sequence is a decode to the attention kernels, more are a chunk."""
    return StepShape(
        prefills=tuple((p.tokens, p.computed_before) for p in parts if p.tokens > 1),
        decodes=tuple(p.computed_before + 1 for p in parts if p.tokens == 1),
    )
