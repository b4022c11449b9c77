"""vLLM's scheduler with settings that the tuner switches between two loads.

Loaded by `--scheduler-cls tuner.scheduler.LiveScheduler` for tuning only; the environment variable CHUNKTUNE_LIVE names
the folder of its commands. Until it is told otherwise it plans as the scheduler that vLLM would have chosen.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from tuner.scheduler.control import Control, StepCounts
from tuner.scheduler.decisions import Budget
from tuner.scheduler.folder import FolderChannel
from tuner.scheduler.handles import (
    HandleError,
    LiveHandleError,
    check_classes,
    check_live,
    check_scheduler,
    switchable,
)
from tuner.scheduler.messages import FOLDER_VARIABLE, Limits, MessageError
from tuner.scheduler.messages import budget_of as budget_of_value
from tuner.scheduler.plugin import BudgetScheduler, budget_of, check_budget

logger = logging.getLogger("vllm.chunktune")

_IN_CONFIG = ("long_prefill_token_threshold", "enable_chunked_prefill")
_ON_SCHEDULER = {
    "long_prefill_token_threshold_adaptive": "adaptive_long_prefill_threshold",
    "scheduler_reserve_full_isl": "scheduler_reserve_full_isl",
    "max_num_active_seqs": "max_num_active_reqs",
}


class LiveScheduler(Scheduler):
    """The scheduler that vLLM would have chosen, under live control. Made by calling this class as vLLM does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> LiveScheduler:
        made: LiveScheduler = object.__new__(_live_class(kwargs["vllm_config"]))
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = switchable(vllm.__version__, Scheduler, KVCacheManager)
        super().__init__(*args, **kwargs)
        check_live(self)
        # A worker in this process keeps what it was sized for.
        self.scheduler_config = copy.copy(self.scheduler_config)
        budget_reason = self._why_no_budget()
        boot_budget = budget_of(self)
        if not boot_budget.off and budget_reason:
            raise HandleError(budget_reason)
        switches = _Switches(self, names)
        if not budget_reason:
            switches.set_budget(boot_budget)
        self._prefilling: dict[str, Request] = {}
        parallel = self.vllm_config.parallel_config
        self._control = Control(
            _channel(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)),
            parallel.data_parallel_index,
            switches,
            Limits(self.scheduler_config.max_num_batched_tokens, self.max_num_running_reqs, self.max_model_len),
            stock_chunk=stock_chunk(self.vllm_config),
            budget_reason=budget_reason,
        )
        base = type(self).__mro__[-1]
        logger.info("chunktune live control of %s", base.__name__)
