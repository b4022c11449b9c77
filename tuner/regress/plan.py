"""How many fresh starts a night takes. Pure; the figures are those of `benchmarks/nightly.py`."""

from __future__ import annotations

ENOUGH_BEHIND = 12
"""Starts behind a baseline that a single start a night can be held against."""
REBASE_STARTS = ENOUGH_BEHIND


def default_starts(behind: int) -> int:
    """Planned starts a night for a baseline of `behind` starts.

    The fewest that find a regression of 10 % on the first night in 90 % of cases. Below 3 behind the
    baseline none does, and more a night cannot mend it: see `thin_baseline`.
    """
    return 1 if behind >= ENOUGH_BEHIND else 3


def thin_baseline(behind: int) -> str:
    """Advice on a baseline that too few starts stand behind; '' when there is nothing to say."""
    if behind >= 3:
        return ""
    many = "a single engine start" if behind == 1 else f"{behind} engine starts"
    return (
        f"the baseline rests on {many}: a regression of 10 % is missed on most nights. Write a better one "
        f"once, while all is well: chunktune regress FROZEN --rebase FILE (it takes {REBASE_STARTS} starts)"
    )
