"""The reuse budget inside vLLM: `--scheduler-cls tuner.scheduler.ReuseBudgetScheduler`.

The decisions import without vLLM; the class is only loaded when it is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ReuseBudgetScheduler":
        from tuner.scheduler.plugin import ReuseBudgetScheduler

        return ReuseBudgetScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
