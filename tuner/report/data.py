"""What a report is made of: plain values, so that this room needs to know nothing about studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.domain.observation import MemoryTimeline
from tuner.domain.outcome import StudyFile, Summary, Trial


@dataclass(frozen=True)
class ReportData:
    """One study, as far as it was measured; whatever is missing leaves its figure out, with a reason."""

    study: StudyFile
    summary: Summary
    trials: Sequence[Trial]
    timelines: Mapping[int, Sequence[tuple[int, MemoryTimeline]]] = field(default_factory=dict)
    """Memory and utilisation samples: trial number to (round, timeline)."""
    ttfts_ms: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """TTFT of every measured request of the rounds that count, by trial number."""
    importances: Mapping[str, float] | None = None
    """Knob to its share of the objective's variance (sums to 1); None when it could not be told."""
    importances_reason: str = ""
    """Why `importances` is None."""
    missing: Sequence[str] = ()
    """What could not be read, in sentences: a cut file, a trial whose requests are gone."""
