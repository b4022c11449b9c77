"""Live control of the fake `vllm`: chunktune's own state machine over the fake's engine.

Imported only when `--scheduler-cls` asks for it, from where vLLM would find it: the folder on PYTHONPATH.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fake_vllm_api import Engine

from tuner.scheduler.control import Control
from tuner.scheduler.decisions import Budget
from tuner.scheduler.folder import FolderChannel
from tuner.scheduler.handles import LiveHandleError, supports_live
from tuner.scheduler.messages import FOLDER_VARIABLE, LIVE_CLASS, Limits

__all__ = ["LIVE_CLASS", "attach"]


class Switches:
    """The fake's engine as something that can be switched."""

    def __init__(self, engine: Engine, script: dict[str, Any], number: int) -> None:
        self._engine = engine
        at_fault = script.get("engine", number) == number
        self._forgets = script.get("forgets_chunk") if at_fault else None
        self._refuses = script.get("refuses_chunk") if at_fault else None
        self._values: dict[str, Any] = {
            "long_prefill_token_threshold": engine.option("long-prefill-token-threshold", 0),
            "long_prefill_token_threshold_adaptive": engine.option("long-prefill-token-threshold-adaptive", False),
            "enable_chunked_prefill": engine.chunked,
            "scheduler_reserve_full_isl": engine.option("scheduler-reserve-full-isl", True),
            "watermark": engine.option("watermark", 0.0),
            "max_num_active_seqs": engine.option("max-num-active-seqs", engine.option("max-num-seqs", 256)),
            "reuse_budget": asdict(Budget()),
        }

    def reset(self) -> bool:
        self._engine.forget()
        return True

    def set(self, values: Any) -> None:
        chunk = values["max_num_batched_tokens"]
        if chunk == self._refuses:
            raise ValueError("a fault on demand")
        if chunk != self._forgets:
            self._engine.chunk = chunk
        self._values = {name: values[name] for name in self._values}

    def read(self) -> dict[str, Any]:
        return {"max_num_batched_tokens": self._engine.chunk, **self._values}

    def begin(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}


class Live:
    """What the API calls: for each request, and for each step."""

    def __init__(self, engine: Engine, script: dict[str, Any], number: int) -> None:
        self._engine = engine
        self._silent = bool(script.get("silent"))
        self._control = Control(
            FolderChannel(Path(os.environ[FOLDER_VARIABLE]), number),
            number,
            Switches(engine, script, number),
            Limits(engine.chunk, int(engine.option("max-num-seqs", 256)), engine.max_model_len),
            stock_chunk=8192,
        )

    def request_comes(self) -> None:
        if not self._silent:
            self._control.request_comes(self._engine.running, time.monotonic())

    def step(self, tokens: int, *, prefill: bool = False, last: bool = False) -> None:
        """A step computes so many tokens of one request."""
        if self._control.counts is not None:
            usage = min(1.0, self._engine.running * 256 / self._engine.kv_tokens)
            self._control.counts.step(tokens, int(prefill), int(last), 0, usage)


def attach(engine: Engine, script: dict[str, Any], number: int) -> str:
    """Put data-parallel engine `number` under live control; why this vLLM cannot be, or ''."""
    reason = supports_live(script.get("version", "0.32.0"))
    if reason:
        return str(LiveHandleError(reason))
    engine.live = Live(engine, script.get("live", {}), number)
    return ""
