"""`chunktune serve`."""

from __future__ import annotations

from tuner.errors import UsageError


def serve() -> int:
    """Not built yet."""
    raise UsageError("serve is not built yet")
