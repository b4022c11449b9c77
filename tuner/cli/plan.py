"""`chunktune plan`."""

from __future__ import annotations

from tuner.errors import UsageError


def plan() -> int:
    """Not built yet."""
    raise UsageError("plan is not built yet")
