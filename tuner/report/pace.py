"""How long is still to go: pure estimates from what has finished."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def time_left_s(finished_s: Sequence[float], trials_left: int, current_elapsed_s: float) -> float | None:
    """Seconds until the study's end, or None before a trial has finished.

    `trials_left` counts the one under way, of which `current_elapsed_s` are spent. The median of
    the finished trials stands for each of them: one slow failure must not double the forecast.
    """
    if not finished_s or trials_left <= 0:
        return 0.0 if trials_left <= 0 and finished_s else None
    typical = median(finished_s)
    return max(typical - current_elapsed_s, 0.0) + typical * (trials_left - 1)


def share_done(elapsed_s: float, earlier_s: Sequence[float]) -> float | None:
    """How much of a step is done, judged by earlier ones of its kind (0 to 0.99); None without any."""
    typical = median(earlier_s) if earlier_s else 0.0
    return None if typical <= 0 else min(elapsed_s / typical, 0.99)


def step_left_s(elapsed_s: float, done: int, total: int) -> float | None:
    """Seconds left in a step that counts its parts; None before the first."""
    return None if done <= 0 else elapsed_s * max(total - done, 0) / done
