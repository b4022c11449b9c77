"""The scheduler plug-in's counters, out of the engine's log: its process has no `/metrics` of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from tuner.scheduler.decisions import Counters

_MARK = "chunktune counters:"


def last_counters(lines: Iterable[str]) -> Counters | None:
    """What the plug-in wrote last, summed over data-parallel engines; up to some seconds old.

    None when an engine wrote nothing that can be read.
    """
    found = {}
    for line in lines:
        if _MARK in line:
            engine = line.partition(")")[0] if line.startswith("(") else ""
            found[engine] = line.partition(_MARK)[2]
    try:
        each = [asdict(Counters.from_line(text)) for text in found.values()]
    except ValueError:
        return None
    return Counters(**{name: sum(one[name] for one in each) for name in each[0]}) if each else None


def counted_between(before: Counters | None, after: Counters | None) -> dict[str, float]:
    """What grew from one look to the next; levels (`protected_blocks`) as they are now. Empty without a look."""
    if after is None:
        return {}
    earlier = asdict(before or Counters())
    return {
        name: float(value if name == "protected_blocks" else value - earlier[name])
        for name, value in asdict(after).items()
    }
