"""A vLLM worker that runs the tiny model on the CPU and answers when the pretended GPU would.

For `vllm serve --worker-cls benchmarks.paced.worker.PacedWorker`; `benchmarks/paced/serve.py` sets it up.
Settings come as JSON in the environment variable CHUNKTUNE_PACED: `cost_model`, `gpu`, `tp`,
`step_time_scale` (1.0), and `log` (a file that gets one JSON line a step: when, its shape, milliseconds asked for
and taken).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from tuner.sim.cost import MeasuredCost, StepShape


class PacedWorker(CPUWorker):
    """Sleeps until the step's time is over; a step that the CPU needs longer for is late and says so in the log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's attention uses AMX without asking the kernel for it: a first request of one token dies of it.
        torch.cpu._init_amx()
        settings = json.loads(os.environ["CHUNKTUNE_PACED"])
        self._cost = MeasuredCost(settings["cost_model"], settings["gpu"], int(settings["tp"]))
        self._scale = float(settings.get("step_time_scale", 1.0))
        self._log = open(settings["log"], "a") if settings.get("log") else None  # noqa: SIM115
        self._due_s: float | None = None
        self._entry: dict[str, Any] = {}

    def execute_model(self, scheduler_output: Any) -> Any:
        started_s = time.monotonic()
        shape = _shape(scheduler_output)
        step_ms = self._cost.step_ms(shape) * self._scale
        self._due_s = started_s + step_ms / 1e3
        output = super().execute_model(scheduler_output)
        if shape.tokens:
            self._entry = {"at": started_s, "prefills": shape.prefills, "decodes": len(shape.decodes), "ms": step_ms}
        # A step that ends with sampling is over when that is; only without sampling is it over here.
        if output is not None:
            self._wait()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        self._wait()
        return output

    def _wait(self) -> None:
        if self._due_s is None:
            return
        left_s = self._due_s - time.monotonic()
        self._due_s = None
        if left_s > 0:
            time.sleep(left_s)
        if self._log is not None and self._entry:
            self._entry["taken_ms"] = (time.monotonic() - self._entry["at"]) * 1e3
            self._log.write(json.dumps(self._entry) + "\n")
            self._log.flush()
            self._entry = {}


def _shape(scheduler_output: Any) -> StepShape:
    """One scheduled token is a decode to the attention kernels, more are a chunk."""
    computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    scheduled = scheduler_output.num_scheduled_tokens
    return StepShape(
        prefills=tuple((n, computed[request]) for request, n in scheduled.items() if n > 1),
        decodes=tuple(computed[request] + 1 for request, n in scheduled.items() if n == 1),
    )
