"""Consoles on this terminal, wide enough to read."""

from __future__ import annotations

from rich.console import Console

LEAST_WIDTH = 60
"""Columns of the narrowest table; a narrower terminal wraps its lines, which loses nothing."""
LEAST_LIVE_WIDTH = 40
"""Columns that a live view needs; it counts its lines, so that it cannot be let wrap for less."""


def result_console() -> Console:
    """Standard output, for tables."""
    return _at_least(Console(highlight=False), LEAST_WIDTH)


def progress_console() -> Console:
    """Standard error, for what is said on the way."""
    return _at_least(Console(stderr=True, highlight=False), LEAST_LIVE_WIDTH)


def _at_least(console: Console, width: int) -> Console:
    # COLUMNS=0, as some schedulers set it, would make every word vanish.
    if console.width < width:
        console.width = width
    return console
