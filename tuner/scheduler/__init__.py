"""What runs inside vLLM: `--scheduler-cls tuner.scheduler.ReuseBudgetScheduler`, and LiveScheduler while tuning.

Decisions and messages import without vLLM; a class is only loaded when it is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ReuseBudgetScheduler":
        from tuner.scheduler.plugin import ReuseBudgetScheduler

        return ReuseBudgetScheduler
    if name == "LiveScheduler":
        from tuner.scheduler.live import LiveScheduler

        return LiveScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
