"""The one door to time. Durations come from the monotonic clock, dates from the wall clock."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What the rest of the project may ask of time."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def now(self) -> datetime:
        """The wall clock, UTC, for stamps in files; never for durations."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait in an event loop."""
        ...


class SystemClock:
    """The machine's own time."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FakeClock:
    """A clock for tests: sleeping moves it, nothing else does."""

    def __init__(self, start_s: float = 1000.0, at: datetime | None = None) -> None:
        self._now_s = start_s
        self._origin = (at or datetime(2026, 1, 1, tzinfo=UTC)) - timedelta(seconds=start_s)

    def monotonic_s(self) -> float:
        return self._now_s

    def now(self) -> datetime:
        return self._origin + timedelta(seconds=self._now_s)

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now_s += seconds


SYSTEM_CLOCK = SystemClock()
