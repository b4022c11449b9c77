"""Live control as a state machine: from a command to a switched scheduler and a report. Knows no vLLM and no clock.

The scheduler inside vLLM, the simulated engine and the fakes of the tests all run this one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from tuner.scheduler.messages import Channel, Command, Limits, MessageError, Report, State, budget_of, refusal

LAPSED: Final = "the lease ran out: the engine went back to the settings of its start"


class Switchable(Protocol):
    """The scheduler that is controlled. Values are those of LIVE_VALUES that it can switch, and always all of them."""

    def reset(self) -> bool:
        """Forget every cached prefix; False, and nothing done, when that is not possible now."""
        ...

    def set(self, values: Mapping[str, Any]) -> None:
        """Run these values from the next step on, with nothing remembered of earlier prefixes.

        An exception says why they cannot run; the values before are then set again.
        """
        ...

    def read(self) -> dict[str, Any]:
        """What it runs, read where the scheduler itself reads it."""
        ...

    def begin(self) -> None:
        """Requests that count come now: forget the one that brought the command."""
        ...

    def counters(self) -> dict[str, float]:
        """What the reuse budget did since `begin`; empty without one."""
        ...


@dataclass
class StepCounts:
    """What the scheduler did, counted step by step."""

    steps: int = 0
    """Steps that computed something."""
    tokens: int = 0
    largest_step_tokens: int = 0
    prefill_chunks: int = 0
    """Shares of steps that computed a part of a prompt; those of preempted requests are left out, here and below."""
    prefills: int = 0
    """Prompts planned to their end."""
    preemptions: int = 0
    kv_usage_peak: float = 0.0
    """Largest share of the KV pool in use after a step was planned, from 0 to 1."""

    def step(self, tokens: int, chunks: int, prefills: int, preemptions: int, usage: float) -> None:
        """One more step was planned; one that computes nothing may have preempted."""
        self.steps += tokens > 0
        self.tokens += tokens
        if tokens > self.largest_step_tokens:
            self.largest_step_tokens = tokens
        self.prefill_chunks += chunks
        self.prefills += prefills
        self.preemptions += preemptions
        if usage > self.kv_usage_peak:
            self.kv_usage_peak = usage


class Control:
    """One engine under control. Times are seconds of a clock that never goes back.

    A command is looked for when a request comes, and obeyed before that request is added. A switch needs an engine
    without requests; it happens as a whole or not at all.
    """

    def __init__(
        self,
        channel: Channel,
        engine: int,
        scheduler: Switchable,
        limits: Limits,
        *,
        stock_chunk: int | None,
        budget_reason: str = "",
    ) -> None:
        self.lease_ends_s = math.inf
        """From then on `lapse` is due."""
        self.counts: StepCounts | None = None
        """Where steps are to be counted; None while they are not."""
        self._channel = channel
        self._engine = engine
        self._scheduler = scheduler
        self._limits = limits
        self._stock_chunk = stock_chunk
        self._budget_reason = budget_reason
        self._boot = scheduler.read()
        self._nonce = ""
        self._lapsed = ""

    def request_comes(self, requests: int, now_s: float) -> None:
        """A request is about to be added to an engine that has `requests` of them, waiting or running."""
        if now_s >= self.lease_ends_s:
            self.lapse(now_s, idle=not requests)
        try:
            command = self._channel.take()
        except MessageError as error:
            self._nonce = ""
            self._answer("refused", str(error), now_s)
            return
        if command is not None:
            self._obey(command, requests, now_s)
        elif not requests and self.counts is None:
            self._scheduler.begin()
            self.counts = StepCounts()

    def lapse(self, now_s: float, *, idle: bool = False) -> None:
        """Go back to the settings of the start, also in the middle of a load: nobody renewed the lease."""
        self.lease_ends_s = math.inf
        if idle:
            self._scheduler.reset()
        self._scheduler.set(self._boot)
        self._lapsed = LAPSED
        self._answer("report", "", now_s)

    def _obey(self, command: Command, requests: int, now_s: float) -> None:
        self._nonce = command.nonce
        if command.op == "report":
            self._answer("report", "", now_s)
            return
        given = {name: value for name, value in command.values.items() if value is not None}
        reason = self._refusal(given)
        if reason:
            self._answer("refused", reason, now_s)
        elif requests:
            self._answer("deferred", f"the engine has {requests} unfinished requests", now_s)
        elif not self._scheduler.reset():
            self._answer("deferred", "the prefix cache cannot be reset, some of its blocks are in use", now_s)
        else:
            self._switch({**self._boot, **given}, command.lease_s, now_s)

    def _switch(self, values: Mapping[str, Any], lease_s: float, now_s: float) -> None:
        before = self._scheduler.read()
        try:
            self._scheduler.set(values)
        except Exception as error:
            self._scheduler.set(before)
            self._answer("refused", str(error) or type(error).__name__, now_s)
            return
        self.lease_ends_s = now_s + lease_s
        self.counts = None
        self._lapsed = ""
        self._answer("applied", "", now_s)

    def _refusal(self, given: Mapping[str, Any]) -> str:
        reason = refusal({**self._boot, **given}, self._limits)
        if reason:
            return reason
        for name in given:
            if name not in self._boot:
                return f"this vLLM cannot switch {name} live"
        return "" if budget_of(given.get("reuse_budget")).off else self._budget_reason

    def _answer(self, state: State, reason: str, now_s: float) -> None:
        counts = asdict(self.counts or StepCounts())
        self._channel.put(
            Report(
                nonce=self._nonce,
                engine=self._engine,
                state=state,
                reason=reason or self._lapsed,
                applied=self._scheduler.read(),
                boot=self._boot,
                stock_chunk=self._stock_chunk,
                budget_supported=not self._budget_reason,
                budget_reason=self._budget_reason,
                lease_left_s=max(0.0, self.lease_ends_s - now_s) if math.isfinite(self.lease_ends_s) else 0.0,
                counters={**counts, **self._scheduler.counters()},
            )
        )
