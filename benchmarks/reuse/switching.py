"""The plug-in with a budget that changes between runs, so that a benchmark starts its engine once.

The file named by CHUNKTUNE_BENCH_BUDGET holds the budget as JSON, read whenever a request comes to an idle engine. An
empty budget is vLLM's own schedule().
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from tuner.scheduler import ReuseBudgetScheduler
from tuner.scheduler.decisions import Budget


class SwitchingScheduler(ReuseBudgetScheduler):
    """ReuseBudgetScheduler that asks for its budget again when it has nothing to do."""

    def add_request(self, request: Any) -> None:
        if not self.requests:
            budget = Budget.from_mapping(json.loads(Path(os.environ["CHUNKTUNE_BENCH_BUDGET"]).read_text()))
            if budget != self._budget:
                self._log_counters(math.inf, 0.0)
                self._begin(budget)
        super().add_request(request)
