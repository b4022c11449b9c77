"""The scheduler plug-in's counters, out of the engine's log: its process has no `/metrics` of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from tuner.scheduler.decisions import Counters

_MARK = "chunktune counters:"


def last_counters(lines: Iterable[str]) -> Counters | None:
    """What the plug-in wrote last; None when it wrote nothing that can be read. Up to some seconds old."""
    found = None
    for line in lines:
        if _MARK in line:
            found = line.partition(_MARK)[2]
    if found is None:
        return None
    try:
        return Counters.from_line(found)
    except ValueError:
        return None


def counted_between(before: Counters | None, after: Counters | None) -> dict[str, float]:
    """What grew from one look to the next; levels (`protected_blocks`) as they are now. Empty without a look."""
    if after is None:
        return {}
    earlier = asdict(before or Counters())
    return {
        name: float(value if name == "protected_blocks" else value - earlier[name])
        for name, value in asdict(after).items()
    }
