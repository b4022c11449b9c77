"""`chunktune freeze`."""

from __future__ import annotations

from tuner.errors import UsageError


def freeze() -> int:
    """Not built yet."""
    raise UsageError("freeze is not built yet")
