"""`chunktune doctor`."""

from __future__ import annotations

from tuner.errors import UsageError


def doctor() -> int:
    """Not built yet."""
    raise UsageError("doctor is not built yet")
