"""The rounds of several starts as one measured level. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.frozen import Measured
from tuner.domain.measurement import Measurement
from tuner.measure.summary import summarize


def measured_of(starts: Sequence[Sequence[Measurement]]) -> Measured:
    """The kept rounds of one setting, by start; starts without one are left out. ValueError when none is left."""
    kept = [list(rounds) for rounds in starts if rounds]
    if not kept:
        raise ValueError("no start with a round that counts")
    rounds = [r for start in kept for r in start]
    summary = summarize(rounds, starts=[number for number, start in enumerate(kept) for _ in start])
    return Measured(
        starts=len(kept),
        rounds=rounds,
        rounds_per_start=[len(start) for start in kept],
        median=summary.median,
        ci95=summary.ci95,
    )


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
