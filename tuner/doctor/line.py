"""One finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Line:
    """`wrong`: a sweep fails or its numbers lie. `warning`: it may, or something cannot be told."""

    check: str
    status: Status
    message: str
    hint: str = ""


def ok(check: str, message: str) -> Line:
    """Nothing to do."""
    return Line(check, "ok", message)


def warning(check: str, message: str, hint: str) -> Line:
    """May go wrong, or cannot be told."""
    return Line(check, "warning", message, hint)


def wrong(check: str, message: str, hint: str) -> Line:
    """Will go wrong."""
    return Line(check, "wrong", message, hint)
