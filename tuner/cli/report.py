"""`chunktune report`."""

from __future__ import annotations

from tuner.errors import UsageError


def report() -> int:
    """Not built yet."""
    raise UsageError("report is not built yet")
