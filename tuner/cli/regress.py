"""`chunktune regress`."""

from __future__ import annotations

from tuner.errors import UsageError


def regress() -> int:
    """Not built yet."""
    raise UsageError("regress is not built yet")
