"""What a long run tells whoever watches; the report room has a view for people, tests take this one."""

from __future__ import annotations

from typing import Protocol

from tuner.domain.outcome import Trial


class Progress(Protocol):
    """Events of a sweep, in order; none of them may block."""

    def study_started(self, total_trials: int, *, kind: str = "study", unit: str = "trial") -> None:
        """`total_trials` of what `unit` names (in the singular) are planned, for what `kind` names."""

    def more_planned(self, more: int, reason: str) -> None:
        """The plan has grown by `more`; `reason` is a whole sentence for people."""

    def trial_started(self, number: int, label: str) -> None: ...

    def stage(self, text: str) -> None: ...

    def round_progress(self, done: int, total: int) -> None: ...

    def trial_finished(self, trial: Trial) -> None: ...

    def message(self, text: str) -> None: ...


class Silent:
    """Nobody watches."""

    def study_started(self, total_trials: int, *, kind: str = "study", unit: str = "trial") -> None:
        pass

    def more_planned(self, more: int, reason: str) -> None:
        pass

    def trial_started(self, number: int, label: str) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def round_progress(self, done: int, total: int) -> None:
        pass

    def trial_finished(self, trial: Trial) -> None:
        pass

    def message(self, text: str) -> None:
        pass
