"""What a report is made of: plain values, so that this room needs to know nothing about studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuner.domain.observation import MemoryTimeline
from tuner.domain.experiment import StudyFile, Summary, Trial


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
    merged: Sequence[Trial] = ()
    """The finals with the rounds of all their starts together; each has the number of its first start."""
    command: Sequence[str] = ()
    """The winner's command line as its frozen file has it; () where there is none."""
    missing: Sequence[str] = ()
    """What could not be read, in sentences: a cut file, a trial whose requests are gone."""

    def shown(self, number: int | None) -> Trial | None:
        """The trial of that number, over all its starts where it is a final; None when there is none."""
        return next((t for t in (*self.merged, *self.trials) if t.number == number), None)

    @property
    def winner(self) -> Trial | None:
        return self.shown(self.summary.best)

    @property
    def baseline(self) -> Trial | None:
        """The baseline's final where there is one (it ran beside the winner's), else the baseline's trial."""
        number = self.summary.baseline
        finals = (t for t in self.merged if number is not None and t.final_of == number and t.median is not None)
        return next(finals, self.shown(number))

    def configurations(self) -> list[Trial]:
        """Measured trials, each configuration once: its merged final, else its latest trial; in order of number."""
        found: dict[str, Trial] = {}
        for trial in (*self.trials, *self.merged):
            if trial.median is not None and trial.state in ("completed", "infeasible", "pruned"):
                budget = "" if trial.reuse_budget is None else trial.reuse_budget.model_dump_json()
                found[f"{sorted(trial.knobs.items())} {budget}"] = trial
        return sorted(found.values(), key=lambda t: t.number)
