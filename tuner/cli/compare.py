"""`chunktune compare`."""

from __future__ import annotations

from tuner.errors import UsageError


def compare() -> int:
    """Not built yet."""
    raise UsageError("compare is not built yet")
