"""A progress that writes down what it hears, for tests of what people are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.domain.experiment import Trial
from tuner.trial.progress import Silent


@dataclass
class Heard(Silent):
    """The plan, and each time it grew."""

    planned: list[tuple[int, str, str]] = field(default_factory=list)
    """Total, kind and unit of each run."""
    more: list[tuple[int, str]] = field(default_factory=list)

    def study_started(
        self, total_trials: int, earlier: Sequence[Trial] = (), *, kind: str = "study", unit: str = "trial"
    ) -> None:
        self.planned.append((total_trials, kind, unit))

    def replanned(self, total_trials: int, reason: str = "") -> None:
        self.more.append((total_trials - self.total, reason))

    @property
    def total(self) -> int:
        """What the counter ends at."""
        return self.planned[-1][0] + sum(more for more, _ in self.more)
