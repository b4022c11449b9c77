"""How many fresh starts a run takes. Pure; the figures are those of `benchmarks/nightly.py`."""

from __future__ import annotations

ENOUGH_STARTS = 12
"""Starts at the freeze that a run of a single start can be judged against."""
REBASE_STARTS = ENOUGH_STARTS

_FOUND_AT_ONCE = {1: 4, 2: 8}
"""Of ten regressions of 10 %, those found in the first run with 3 starts, by starts at the freeze."""


def default_starts(at_freeze: int) -> int:
    """Planned starts of a run, against a frozen file that was measured over `at_freeze` starts.

    The fewest that find a regression of 10 % in the first run in 90 % of cases. With 1 or 2 at the freeze no number
    does, since the frozen level's own error stays: see `few_starts_advice`.
    """
    return 1 if at_freeze >= ENOUGH_STARTS else 3


def few_starts_advice(at_freeze: int, *, stock: bool) -> str:
    """Advice on a frozen file that was measured over too few starts; '' when there is none to give.

    With `stock` a rebase starts the stock setting as often.
    """
    found = _FOUND_AT_ONCE.get(at_freeze)
    if found is None:
        return ""
    cost = REBASE_STARTS * (2 if stock else 1)
    many = "a single engine start" if at_freeze == 1 else f"{at_freeze} engine starts"
    return (
        f"the file was frozen from {many}: of ten regressions of 10 %, the first run finds about {found}. Measure it "
        f"again once, while all is well: chunktune regress FROZEN --rebase FILE (it takes {cost} starts)"
    )
