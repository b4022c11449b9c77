"""Where memory samples come from: four sources behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from tuner.domain.observation import MemorySample

SourceName = Literal["nvml", "host", "simulated", "unavailable"]


class SourceError(Exception):
    """A source cannot be opened; the text is the reason that is shown."""


TREE_EVERY_S = 1.0


class Tree:
    """The engine's process tree, looked up once a second: each look-up reads all of /proc.

    At every sample it would compete with the client for the interpreter; workers live for the whole run.
    """

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._known: list[int] = []
        self._looked_s: float | None = None

    def at(self, at_s: float) -> list[int]:
        """The pids as of at most a second before `at_s`."""
        if self._looked_s is None or not 0 <= at_s - self._looked_s < TREE_EVERY_S:
            self._known, self._looked_s = self._pids(), at_s
        return self._known


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
