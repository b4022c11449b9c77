"""Live control of the simulated engine: the state machine of the plug-in over `Core`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tuner.scheduler.control import Control
from tuner.scheduler.decisions import Budget
from tuner.scheduler.folder import FolderChannel
from tuner.scheduler.messages import Limits, budget_of
from tuner.sim.core import Core, StockPolicy
from tuner.sim.policy import BudgetPolicy


class CoreSwitches:
    """Where `Core` reads its live values; a `Switchable`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._budget = core.policy.budget if isinstance(core.policy, BudgetPolicy) else Budget()

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


def control_of(core: Core, folder: Path, stock_chunk: int) -> Control:
    """The control of an engine that was just started. MessageError when the folder is not private."""
    config = core.config
    limits = Limits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
    return Control(FolderChannel(folder, 0), 0, CoreSwitches(core), limits, stock_chunk=stock_chunk)
