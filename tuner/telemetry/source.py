"""Where memory samples come from: four sources behind one small interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from tuner.domain.observation import MemorySample

SourceName = Literal["nvml", "host", "simulated", "unavailable"]


class SourceError(Exception):
    """A source cannot be opened; the text is the reason that is shown."""


class MemorySource(Protocol):
    """A way to look at memory. Called from one thread at a time, never from the event loop."""

    name: SourceName
    reason: str
    """Why there is nothing, or what is missing; '' when nothing is."""

    def open(self) -> None:
        """Make ready; SourceError with the reason when that cannot be. Again is harmless."""
        ...

    def sample(self, at_s: float) -> list[MemorySample]:
        """One look, stamped with `at_s`; what cannot be read is left out and `reason` says why."""
        ...

    def total_bytes(self) -> Mapping[str, int]:
        """Capacity by device, of an open source."""
        ...

    def close(self) -> None:
        """Let go; again is harmless."""
        ...


class Unavailable:
    """No memory can be seen, and this is why."""

    name: SourceName = "unavailable"

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def open(self) -> None:
        pass

    def sample(self, at_s: float) -> list[MemorySample]:
        return []

    def total_bytes(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass
