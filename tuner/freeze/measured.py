"""The rounds of several starts as one measured level. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tuner.domain.frozen import Measured
from tuner.domain.measurement import Ci95, Measurement, metric
from tuner.measure.contrast import level_interval
from tuner.measure.summary import summarize


def measured_of(starts: Sequence[Sequence[Measurement]]) -> Measured:
    """The kept rounds of one setting, by start; starts without one are left out. ValueError when none is left."""
    kept = [list(rounds) for rounds in starts if rounds]
    if not kept:
        raise ValueError("no start with a round that counts")
    rounds = [r for start in kept for r in start]
    summary = summarize(rounds)
    return Measured(
        starts=len(kept),
        rounds=rounds,
        rounds_per_start=[len(start) for start in kept],
        median=summary.median,
        ci95=_intervals(kept, summary.median, summary.ci95),
    )


def _intervals(starts: Sequence[Sequence[Measurement]], median: Measurement, paths: Iterable[str]) -> Ci95:
    """Over starts, by the same model as the contrasts of a study."""
    found = {}
    for path in paths:
        values = [np.array([v for r in rounds if (v := metric(r, path)) is not None]) for rounds in starts]
        middle = metric(median, path)
        interval = None if middle is None else level_interval(values, middle)
        if interval is not None:
            found[path] = interval
    return found


def rounds_by_start(measured: Measured) -> list[list[Measurement]]:
    """The rounds apart again; spread evenly when a file does not say which belongs to which start."""
    counts = measured.rounds_per_start
    if sum(counts) != len(measured.rounds) or not counts:
        share, rest = divmod(len(measured.rounds), measured.starts)
        counts = [share + (i < rest) for i in range(measured.starts)]
    by_start, at = [], 0
    for count in counts:
        by_start.append(measured.rounds[at : at + count])
        at += count
    return [start for start in by_start if start]
