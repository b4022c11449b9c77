"""What every kind of load can do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tuner.load.plan import Arrivals, PlannedRequest


class Load(Protocol):
    """The content and the arrivals of a workload, for one server."""

    label: str
    """What the reader of the numbers has to know, '' for nothing."""

    def arrivals(self, content_key: str, arrivals_key: str) -> tuple[Arrivals, ...]:
        """A round's, the leading process first.

        Lengths, order and times come from `arrivals_key`, the content of prompts from `content_key`.
        """
        ...

    def warm_up(self, key: str) -> tuple[Arrivals, ...]:
        """The longest prompts, as many as are ever in flight, on content of their own."""
        ...

    def longest_tokens(self) -> int | None:
        """Prompt and output of the longest request; None where only the server can count."""
        ...


def until_measured(requests: Iterable[PlannedRequest], measured: int) -> list[PlannedRequest]:
    """Open loop: the beginning of `requests` in which so many are not the first of their prefix."""
    chosen: list[PlannedRequest] = []
    seen: set[int] = set()
    for request in requests:
        if not measured:
            break
        chosen.append(request)
        if request.prefix is None or request.prefix in seen:
            measured -= 1
        else:
            seen.add(request.prefix)
    return chosen
