"""`chunktune bench`."""

from __future__ import annotations

from tuner.errors import UsageError


def bench() -> int:
    """Not built yet."""
    raise UsageError("bench is not built yet")
