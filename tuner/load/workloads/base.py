"""What every kind of load can do."""

from __future__ import annotations

from typing import Protocol

from tuner.load.plan import Arrivals


class Load(Protocol):
    """The content and the arrivals of a workload, for one server."""

    def arrivals(self, key: str) -> tuple[Arrivals, ...]:
        """A round's; new content for every key, the leading process first."""
        ...

    def warm_up(self, key: str) -> tuple[Arrivals, ...]:
        """The longest prompts, as many as are ever in flight, on content of their own."""
        ...

    def longest_tokens(self) -> int | None:
        """Prompt and output of the longest request; None where only the server can count."""
        ...
