"""Live control from the tuner's side: commands to a running engine, and proof of what it runs."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tuner.clock import Clock
from tuner.engine.diagnosis import cause
from tuner.errors import EngineError
from tuner.scheduler.folder import read_report, write_command
from tuner.scheduler.messages import Command, MessageError, Op, Report

ANSWER_WAIT_S: Final = 20.0
"""An idle engine answers with the probe's own reply; this is for one that has just become idle, or is slow."""
_TICK_S: Final = 0.05
_PEAKS: Final = ("largest_step_tokens", "kv_usage_peak")

Probe = Callable[[int], Awaitable[None]]
"""Sends a request of one token to data-parallel engine number n. EngineError when the engine has died."""


class SwitchRefused(Exception):
    """The running engine does not take these values; the text is one sentence."""


@dataclass(frozen=True)
class LiveFacts:
    """What a live engine says of itself at its start."""

    boot: dict[str, Any]
    """The live values that it was started with."""
    stock_chunk: int | None
    """The chunk size that it chooses when it is not told any; None when it does not say."""
    budget_reason: str
    """Why it cannot serve a reuse budget; '' when it can."""


@dataclass(frozen=True)
class LiveReport:
    """What every engine of a start reports after a round."""

    applied: list[Mapping[str, Any]]
    """What each of them runs."""
    counters: dict[str, float]
    """Summed over engines, peaks as the largest."""
    reason: str = ""
    """What one of them says of itself, such as that its lease ran out."""

    def mismatch(self, values: Mapping[str, Any]) -> str:
        """The first difference from what was requested, as a sentence; '' when every engine runs it."""
        for engine, applied in enumerate(self.applied):
            for name, want in values.items():
                if want is not None and name in applied and not _same(want, applied[name]):
                    where = f" on engine {engine}" if len(self.applied) > 1 else ""
                    why = f"; {self.reason}" if self.reason else ""
                    return f"requested {name} {_text(want)}, running {_text(applied[name])}{where}{why}"
        chunk, largest = values.get("max_num_batched_tokens"), self.counters.get("largest_step_tokens", 0.0)
        if isinstance(chunk, int) and largest > chunk:
            return f"requested max_num_batched_tokens {chunk}, a step had {largest:.0f} tokens"
        return ""


class LiveControl:
    """Switches the settings of one engine start, of all its data-parallel engines alike."""

    def __init__(self, folder: Path, engines: int, probe: Probe, clock: Clock) -> None:
        self._folder = folder
        self._engines = engines
        self._probe = probe
        self._clock = clock

    async def facts(self) -> LiveFacts:
        """EngineError `live_lost` when an engine does not answer."""
        first = (await self._reports())[0]
        return LiveFacts(dict(first.boot), first.stock_chunk, first.budget_reason)

    async def apply(self, values: Mapping[str, Any], lease_s: float) -> None:
        """Make every engine run these values, with nothing cached; after `lease_s` they go back to their boot values.

        SwitchRefused when one of them does not take them; EngineError `live_lost` when one does not answer, or does
        not become idle in time.
        """
        deadline_s = self._clock.monotonic_s() + ANSWER_WAIT_S
        while True:
            reports = await self._ask("apply", values, lease_s)
            refused = next((r for r in reports if r.state == "refused"), None)
            if refused is not None:
                raise SwitchRefused(refused.reason)
            deferred = next((r for r in reports if r.state == "deferred"), None)
            if deferred is None:
                return
            if self._clock.monotonic_s() >= deadline_s:
                raise EngineError(cause("live_lost", deferred.reason))
            await self._clock.sleep(_TICK_S)

    async def report(self) -> LiveReport:
        """What they run, and what they did since the first request after the last `apply`."""
        reports = await self._reports()
        counters: dict[str, float] = {}
        for report in reports:
            for name, value in report.counters.items():
                seen = counters.get(name, 0.0)
                counters[name] = max(seen, value) if name in _PEAKS else seen + value
        return LiveReport([r.applied for r in reports], counters, next((r.reason for r in reports if r.reason), ""))

    async def _reports(self) -> list[Report]:
        reports = await self._ask("report")
        for report in reports:
            if report.state != "report":
                raise EngineError(cause("live_lost", report.reason))
        return reports

    async def _ask(self, op: Op, values: Mapping[str, Any] | None = None, lease_s: float = 0.0) -> list[Report]:
        command = Command(secrets.token_hex(8), op, dict(values or {}), lease_s)
        try:
            write_command(self._folder, command)
        except OSError as error:
            raise EngineError(cause("live_lost", f"a command cannot be written: {error.strerror}")) from None
        return [await self._answer(engine, command.nonce) for engine in range(self._engines)]

    async def _answer(self, engine: int, nonce: str) -> Report:
        """The engine looks for a command when a request comes, so it is sent one."""
        deadline_s = self._clock.monotonic_s() + ANSWER_WAIT_S
        while True:
            await self._probe(engine)
            try:
                report = read_report(self._folder, engine)
            except MessageError as error:
                raise EngineError(cause("live_lost", str(error))) from None
            if report is not None and report.nonce == "":
                # It could not read the command, whatever is in it.
                raise EngineError(cause("live_lost", report.reason))
            if report is not None and report.nonce == nonce:
                return report
            if self._clock.monotonic_s() >= deadline_s:
                which = f"engine {engine} of {self._engines}" if self._engines > 1 else "the engine"
                raise EngineError(cause("live_lost", f"{which} did not answer a command in {ANSWER_WAIT_S:g} s"))
            await self._clock.sleep(_TICK_S)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_same(one[name], other.get(name)) for name in one)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each:g}" for name, each in value.items() if each) or "off"
    return str(value)
