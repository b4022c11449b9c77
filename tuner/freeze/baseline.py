"""The rounds of several starts as one baseline. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.frozen import Baseline
from tuner.domain.measurement import Measurement
from tuner.domain.experiment import Trial
from tuner.measure.summary import summarize


def baseline_of(trials: Sequence[Trial]) -> Baseline:
    """One baseline of trials of the same configuration, each of which is one fresh engine start.

    Void rounds are left out, and so is a start without a valid one; ValueError when none is left.
    """
    return baseline_of_rounds([[r for r in trial.rounds if r.void is None] for trial in trials])


def baseline_of_rounds(starts: Sequence[Sequence[Measurement]]) -> Baseline:
    """The same from valid rounds by start."""
    kept = [list(rounds) for rounds in starts if rounds]
    if not kept:
        raise ValueError("no start with a valid round")
    rounds = [r for start in kept for r in start]
    summary = summarize(rounds, [])
    return Baseline(
        starts=len(kept),
        rounds=rounds,
        rounds_per_start=[len(start) for start in kept],
        median=summary.median,
        ci95=summary.ci95,
    )


def rounds_by_start(baseline: Baseline) -> list[list[Measurement]]:
    """The rounds apart again; spread evenly when a file does not say which belongs to which start."""
    counts = baseline.rounds_per_start
    if sum(counts) != len(baseline.rounds) or not counts:
        share, rest = divmod(len(baseline.rounds), max(1, baseline.starts))
        counts = [share + (i < rest) for i in range(max(1, baseline.starts))]
    by_start, at = [], 0
    for count in counts:
        by_start.append([r for r in baseline.rounds[at : at + count] if r.void is None])
        at += count
    return [start for start in by_start if start]
