"""The search design: which start and which round come next, until the finals are through. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.domain.experiment import Results, SettingId, SettingState, Start
from tuner.experiment.design import StartPlan, Step
from tuner.study.problem import Problem, Registry


@dataclass(frozen=True)
class Outlook:
    """What is still to come, for the expected time."""

    starts: int
    """Further starts, most likely."""
    least_starts: int
    most_starts: int
    rounds: int
    """Further rounds, most likely."""
    least_rounds: int
    most_rounds: int
    settings: int
    """Settings in question, stock and references included."""
    cycles: int
    """Cycles of the search still to come, most likely."""


class SweepDesign:
    """`tuner.experiment.design.Design` of a sweep."""

    def __init__(self, problem: Problem, registry: Registry) -> None: ...

    def next_start(self, results: Results) -> StartPlan | None:
        raise NotImplementedError

    def next_step(self, results: Results, start: Start) -> Step | None:
        raise NotImplementedError

    def states(self, results: Results) -> dict[SettingId, tuple[SettingState, str]]:
        """State of every setting, and why it was eliminated, is infeasible or failed ('' when measured)."""
        raise NotImplementedError

    def outlook(self, results: Results) -> Outlook:
        raise NotImplementedError
