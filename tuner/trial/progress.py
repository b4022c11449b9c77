"""What a long run tells whoever watches; the report room has a view for people, tests take this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tuner.domain.experiment import Trial


class Progress(Protocol):
    """Events of a sweep, in order; none of them may block."""

    def study_started(
        self, total_trials: int, earlier: Sequence[Trial] = (), *, kind: str = "study", unit: str = "trial"
    ) -> None:
        """How many of what `unit` names (in the singular) there will be, as far as it is known, for what `kind` names;
        those in `earlier` are measured already."""

    def replanned(self, total_trials: int, reason: str = "") -> None:
        """More is known about that number; `reason` is a sentence for people where it has grown."""

    def trial_started(self, number: int, label: str) -> None: ...

    def stage(self, text: str) -> None: ...

    def round_progress(self, done: int, total: int) -> None: ...

    def trial_finished(self, trial: Trial) -> None: ...

    def message(self, text: str, *, routine: bool = False) -> None:
        """A sentence for people; a `routine` one is no warning."""


class Silent:
    """Nobody watches."""

    def study_started(
        self, total_trials: int, earlier: Sequence[Trial] = (), *, kind: str = "study", unit: str = "trial"
    ) -> None:
        pass

    def replanned(self, total_trials: int, reason: str = "") -> None:
        pass

    def trial_started(self, number: int, label: str) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def round_progress(self, done: int, total: int) -> None:
        pass

    def trial_finished(self, trial: Trial) -> None:
        pass

    def message(self, text: str, *, routine: bool = False) -> None:
        pass
