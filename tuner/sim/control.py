"""The simulated scheduler under live control: `LiveScheduler` of the plug-in, over `Core`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tuner.scheduler.control import Control
from tuner.scheduler.decisions import Budget
from tuner.scheduler.messages import Channel, Limits, budget_of
from tuner.sim.core import Core, Request, SchedulerConfig, Step, StockPolicy
from tuner.sim.policy import BudgetPolicy


class LiveCore(Core):
    """`Core` that obeys the commands of a channel."""

    def __init__(
        self,
        config: SchedulerConfig,
        channel: Channel,
        stock_chunk: int,
        budget: Budget | None = None,
        *,
        vocabulary: int = 900,
    ) -> None:
        super().__init__(config, vocabulary=vocabulary)
        limits = Limits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        switches = CoreSwitches(self, budget or Budget())
        self._control = Control(channel, 0, switches, limits, stock_chunk=stock_chunk)

    def add(self, request: Request) -> None:
        self._control.request_comes(len(self.waiting) + len(self.running), request.arrived_s)
        super().add(request)

    def plan(self, now_s: float) -> Step | None:
        if now_s >= self._control.lease_ends_s:
            self._control.lapse(now_s)
        preemptions = self.totals.preemptions
        step = super().plan(now_s)
        counts = self._control.counts
        if counts is not None:
            parts = step.parts if step is not None else []
            prompts = [p for p in parts if p.computed_before < p.request.prompt_tokens and not p.request.preemptions]
            done = sum(p.computed_before + p.tokens >= p.request.prompt_tokens for p in prompts)
            tokens = sum(part.tokens for part in parts)
            counts.step(tokens, len(prompts), done, self.totals.preemptions - preemptions, self.pool.usage)
        return step


class CoreSwitches:
    """Where `Core` reads its live values; a `Switchable`."""

    def __init__(self, core: Core, budget: Budget) -> None:
        self._core = core
        self._budget = budget
        self.begin()

    def reset(self) -> bool:
        return self._core.reset_prefix_cache()

    def set(self, values: Mapping[str, Any]) -> None:
        core = self._core
        budget = budget_of(values.get("reuse_budget"))
        if not budget.off and not core.config.enable_prefix_caching:
            raise ValueError("a reuse budget cannot be served here: prefix caching is off")
        core.configure(replace(core.config, **{name: v for name, v in values.items() if name != "reuse_budget"}))
        self._budget = budget
        self.begin()

    def read(self) -> dict[str, Any]:
        config = self._core.config
        return {
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "long_prefill_token_threshold": config.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": config.long_prefill_token_threshold_adaptive,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "scheduler_reserve_full_isl": config.scheduler_reserve_full_isl,
            "watermark": config.watermark,
            "max_num_active_seqs": self._core.slots,
            "reuse_budget": asdict(self._budget),
        }

    def begin(self) -> None:
        off, blocks = self._budget.off, self._core.config.num_blocks
        self._core.policy = StockPolicy() if off else BudgetPolicy(self._budget, blocks)

    def counters(self) -> dict[str, float]:
        policy = self._core.policy
        if not isinstance(policy, BudgetPolicy):
            return {}
        return {name: float(value) for name, value in asdict(policy.counters).items()}
