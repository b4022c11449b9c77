"""vLLM's scheduler with settings that the tuner switches between two loads.

Loaded by `--scheduler-cls tuner.scheduler.LiveScheduler`, for tuning only; the environment variable CHUNKTUNE_LIVE
names the folder of its commands. Before the first one it plans as the scheduler that vLLM would have chosen.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tuner.scheduler import messages
from tuner.scheduler.control import Control, StepCounts
from tuner.scheduler.decisions import Budget
from tuner.scheduler.folder import channel_of
from tuner.scheduler.handles import (
    HandleError,
    LiveHandleError,
    check_classes,
    check_live,
    check_scheduler,
    switchable,
)
from tuner.scheduler.plugin import BudgetScheduler, budget_of, check_budget

logger = logging.getLogger("vllm.chunktune")


class LiveScheduler(Scheduler):
    """The scheduler that vLLM would have chosen, under live control.

    Calling the class makes one of a subclass that has that scheduler below it, and the reuse budget where this vLLM
    has its handles.
    """

    _budget_reason = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> LiveScheduler:
        made: LiveScheduler = object.__new__(_class_for(kwargs["vllm_config"]))
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = switchable(vllm.__version__, Scheduler, KVCacheManager)
        super().__init__(*args, **kwargs)
        check_live(self)
        # A worker in this process reads the same object, and keeps to what it was sized for.
        self.scheduler_config: Any = copy.copy(self.scheduler_config)
        reason = self._budget_reason or _why_no_budget(self)
        boot_budget = budget_of(self)
        if not reason:
            check_budget(self, boot_budget)
            self._begin(boot_budget)
        elif not boot_budget.off:
            raise HandleError(reason)
        config = self.scheduler_config
        engine = self.vllm_config.parallel_config.data_parallel_index
        self._prefilling: set[str] = set()
        self._control = Control(
            channel_of(os.environ, engine),
            engine,
            _Switches(self, names, budget=not reason),
            messages.Limits(config.max_num_batched_tokens, config.max_num_seqs, self.max_model_len),
            stock_chunk=stock_chunk(self.vllm_config),
            budget_reason=f"a reuse budget cannot be served here: {reason}" if reason else "",
        )
        logger.info("chunktune live control of %s", type(self).__name__)

    def add_request(self, request: Request) -> None:
        """As vLLM does, after obeying a command that came with it."""
        self._control.request_comes(len(self.requests), time.monotonic())
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's step, counted."""
        now_s = time.monotonic()
        if now_s >= self._control.lease_ends_s:
            self._control.lapse(now_s)
        output = super().schedule(*args, **kwargs)
        counts = self._control.counts
        if counts is not None:
            self._count(output, counts)
        return output

    def _count(self, output: SchedulerOutput, counts: StepCounts) -> None:
        chunks = prefills = 0
        shares = output.num_scheduled_tokens
        if self._prefilling:
            for each in [*self._prefilling]:
                request = self.requests.get(each)
                if request is None or request.num_preemptions:
                    self._prefilling.remove(each)
                elif each in shares:
                    chunks += 1
                    if request.num_computed_tokens >= request.num_prompt_tokens:
                        prefills += 1
                        self._prefilling.remove(each)
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if request.num_preemptions:
                continue
            chunks += 1
            if request.num_computed_tokens >= request.num_prompt_tokens:
                prefills += 1
            else:
                self._prefilling.add(new.req_id)
        preempted = len(output.preempted_req_ids or ())
        counts.step(output.total_num_scheduled_tokens, chunks, prefills, preempted, self.kv_cache_manager.usage)


class _Switches:
    """Where a scheduler of vLLM's reads its live values; a `Switchable`."""

    _IN_CONFIG = ("long_prefill_token_threshold", "enable_chunked_prefill")
    _ON_SCHEDULER = (
        ("long_prefill_token_threshold_adaptive", "adaptive_long_prefill_threshold"),
        ("scheduler_reserve_full_isl", "scheduler_reserve_full_isl"),
        ("max_num_active_seqs", "max_num_active_reqs"),
    )
    # Renamed after vLLM 0.30.
    _ADMISSION_CAP = ("max_admission_blocks_per_request", "_max_admission_blocks_per_request")

    def __init__(self, scheduler: Any, names: tuple[str, ...], *, budget: bool) -> None:
        self._scheduler = scheduler
        self._names = names
        self._budget = budget
        self._boot_chunk: int = scheduler.scheduler_config.max_num_batched_tokens
        # Below the chunk where `--max-num-scheduled-tokens` says so.
        self._most_scheduled: int = scheduler.max_num_scheduled_tokens

    def reset(self) -> bool:
        return bool(self._scheduler.reset_prefix_cache())

    def set(self, values: Mapping[str, Any]) -> None:
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        budget = messages.budget_of(values.get("reuse_budget"))
        try:
            check_budget(scheduler, budget)
        except HandleError as error:
            raise ValueError(f"a reuse budget cannot be served here: {error.what}") from None
        chunk = values["max_num_batched_tokens"]
        config.max_num_batched_tokens = chunk
        scheduler.max_num_scheduled_tokens = min(chunk, self._most_scheduled)
        self._set_admission_caps(chunk)
        for name in self._IN_CONFIG:
            setattr(config, name, values[name])
        for name, attribute in self._ON_SCHEDULER:
            if name in self._names:
                setattr(scheduler, attribute, values[name])
        if "watermark" in self._names:
            config.watermark = values["watermark"]
            scheduler.kv_cache_manager.watermark_blocks = self._blocks(values["watermark"])
        if self._budget:
            scheduler._begin(budget)
        logger.info("chunktune live settings: %s", dict(values))

    def read(self) -> dict[str, Any]:
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        chunk, scheduled = config.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
        values = {"max_num_batched_tokens": chunk if scheduled == min(chunk, self._most_scheduled) else scheduled}
        values |= {name: getattr(config, name) for name in self._IN_CONFIG}
        values |= {name: getattr(scheduler, attribute) for name, attribute in self._ON_SCHEDULER if name in self._names}
        if "watermark" in self._names:
            blocks = scheduler.kv_cache_manager.watermark_blocks
            same = blocks == self._blocks(config.watermark)
            values["watermark"] = config.watermark if same else blocks / scheduler.kv_cache_config.num_blocks
        values["reuse_budget"] = asdict(scheduler._budget if self._budget else Budget())
        return values

    def begin(self) -> None:
        if self._budget:
            self._scheduler._begin(self._scheduler._budget)

    def counters(self) -> dict[str, float]:
        if not self._budget or self._scheduler._budget.off:
            return {}
        return {name: float(value) for name, value in asdict(self._scheduler._counted()).items()}

    def _blocks(self, watermark: float) -> int:
        return int(watermark * self._scheduler.kv_cache_config.num_blocks)

    def _set_admission_caps(self, chunk: int) -> None:
        """A sliding window is admitted with room for the tokens in flight, which smaller chunks make fewer."""
        scheduler = self._scheduler
        in_flight = scheduler.vllm_config.max_in_flight_tokens * chunk // self._boot_chunk
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            for attribute in self._ADMISSION_CAP:
                if getattr(manager, attribute, None) is not None:
                    cap = manager.kv_cache_spec.max_admission_blocks_per_request(in_flight, scheduler.max_model_len)
                    setattr(manager, attribute, cap)


def _class_for(vllm_config: Any) -> type:
    """LiveScheduler over the scheduler that vLLM would have chosen."""
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise LiveHandleError("a diffusion model has a scheduler of its own")
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    chosen = config.get_scheduler_cls()
    name, body = f"Live{chosen.__name__}", {"__module__": __name__}
    try:
        check_classes(vllm.__version__, chosen, Request, KVCacheBlock)
    except HandleError as error:
        return type(name, (LiveScheduler, chosen), {**body, "_budget_reason": error.what})
    return type(name, (LiveScheduler, BudgetScheduler, chosen), body)


def _why_no_budget(scheduler: Any) -> str:
    try:
        check_scheduler(scheduler)
    except HandleError as error:
        return error.what
    return "" if scheduler.cache_config.enable_prefix_caching else "prefix caching is off (--enable-prefix-caching)"


def stock_chunk(vllm_config: Any) -> int | None:
    """The `max_num_batched_tokens` that `vllm serve` takes here when it is not told; None where vLLM does not say.

    vLLM's own rule is asked, with the other options as they are.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext

        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        args = object.__new__(EngineArgs)
        args.tensor_parallel_size = parallel.tensor_parallel_size
        args.pipeline_parallel_size = parallel.pipeline_parallel_size
        args.performance_mode = vllm_config.performance_mode
        args.enable_chunked_prefill = scheduler.enable_chunked_prefill
        args.max_num_seqs = scheduler.max_num_seqs
        args.max_num_batched_tokens = None
        args._set_default_max_num_seqs_and_batched_tokens_args(
            UsageContext.OPENAI_API_SERVER, vllm_config.model_config, parallel
        )
        chosen = args.max_num_batched_tokens
    except Exception as error:
        logger.info("chunktune: this vLLM does not say its own max_num_batched_tokens: %s", error)
        return None
    return chosen if messages.is_whole(chosen) else None
