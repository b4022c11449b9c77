"""How many fresh starts a night takes. Pure; the figures are those of `benchmarks/nightly.py`."""

from __future__ import annotations

ENOUGH_BEHIND = 12
"""Starts behind a baseline that a single start a night can be held against."""
REBASE_STARTS = ENOUGH_BEHIND


def default_starts(behind: int) -> int:
    """Planned starts a night for a baseline of `behind` starts.

    The fewest that find a regression of 10 % on the first night in 90 % of cases. With 1 or 2 behind the
    baseline no number does, since the baseline's own error stays: see `thin_baseline`.
    """
    return 1 if behind >= ENOUGH_BEHIND else 3


_FOUND_AT_ONCE = {1: 4, 2: 8}
"""Of ten regressions of 10 %, those found on the first night with 3 starts, by starts behind the baseline."""


def thin_baseline(behind: int, *, control: bool) -> str:
    """Advice on a baseline that too few starts stand behind; '' when there is nothing to say.

    With `control` a rebase starts the stock configuration as often.
    """
    found = _FOUND_AT_ONCE.get(behind)
    if found is None:
        return ""
    cost = REBASE_STARTS * (2 if control else 1)
    many = "a single engine start" if behind == 1 else f"{behind} engine starts"
    return (
        f"the baseline rests on {many}: of ten regressions of 10 % it finds about {found} on the first night. Write a "
        f"better one once, while all is well: chunktune regress FROZEN --rebase FILE (it takes {cost} starts)"
    )
