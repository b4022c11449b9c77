"""An engine under live control without a scheduler: values in a dictionary, and faults on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tuner.scheduler.control import Control
from tuner.scheduler.decisions import Budget
from tuner.scheduler.messages import Channel, Limits

LIMITS = Limits(max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=4096)
BOOT: Mapping[str, Any] = {
    "max_num_batched_tokens": 8192,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "enable_chunked_prefill": True,
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "max_num_active_seqs": 64,
    "reuse_budget": asdict(Budget()),
}


@dataclass
class FakeLiveEngine:
    """`request_comes` and `step` are what a scheduler would see; the rest is its `Switchable`."""

    channel: Channel
    number: int = 0
    budget_reason: str = ""
    values: dict[str, Any] = field(default_factory=lambda: dict(BOOT))
    requests: int = 0
    now_s: float = 0.0
    silent: bool = False
    blocks_in_use: int = 0
    """The next so many attempts to reset the cache fail."""
    fails_at: Any = None
    """Setting this chunk fails after half of the values are set."""
    ignores: str = ""
    """A value that it says it sets, and does not."""
    resets: int = 0
    budget_counters: dict[str, float] = field(default_factory=dict)
    control: Control = field(init=False)

    def __post_init__(self) -> None:
        self.control = Control(
            self.channel, self.number, self, LIMITS, stock_chunk=2048, budget_reason=self.budget_reason
        )

    def request_comes(self) -> None:
        if not self.silent:
            self.control.request_comes(self.requests, self.now_s)

    def step(self, tokens: int, preemptions: int = 0, usage: float = 0.0) -> None:
        if self.now_s >= self.control.lease_ends_s:
            self.control.lapse(self.now_s)
        if self.control.counts is not None:
            self.control.counts.step(tokens, 0, 0, preemptions, usage)

    def reset(self) -> bool:
        if self.blocks_in_use:
            self.blocks_in_use -= 1
            return False
        self.resets += 1
        return True

    def set(self, values: Mapping[str, Any]) -> None:
        for at, (name, value) in enumerate(values.items()):
            if at >= len(values) // 2 and values["max_num_batched_tokens"] == self.fails_at:
                raise RuntimeError("the scheduler broke")
            if name != self.ignores:
                self.values[name] = value

    def read(self) -> dict[str, Any]:
        budget = {**BOOT["reuse_budget"], **(self.values["reuse_budget"] or {})}
        return {**self.values, "reuse_budget": budget}

    def begin(self) -> None:
        self.budget_counters = {}

    def counters(self) -> dict[str, float]:
        return self.budget_counters
