"""`chunktune sweep`."""

from __future__ import annotations

from tuner.errors import UsageError


def sweep() -> int:
    """Not built yet."""
    raise UsageError("sweep is not built yet")
