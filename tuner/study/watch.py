"""What goes on beside a sweep's measurements: Optuna's record and the expected time."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.clock import Clock
from tuner.domain.experiment import Results, Round, Start
from tuner.domain.measurement import metric
from tuner.experiment.design import Named, StartPlan, Step
from tuner.experiment.events import Events
from tuner.study.design import SweepDesign
from tuner.study.expected import Pace, expect, measured
from tuner.study.problem import Problem
from tuner.study.record import Record


def unmeasured_objective(results: Results, problem: Problem) -> str:
    """Which metric of the objective no kept round has, and why; '' where each was measured, or there is no round."""
    rounds = [r.measurement for r in results.kept()]
    for path in problem.objective.metrics if rounds else ():
        if all(metric(measurement, path) is None for measurement in rounds):
            reason = rounds[0].unmeasured.get(path.partition(".")[0])
            return f"{path}, which the profile optimizes, is not measured{f': {reason}' if reason else ''}"
    return ""


@dataclass(frozen=True)
class Answerable:
    """The design, ended once the first round shows that the objective cannot be measured on this load."""

    design: SweepDesign
    problem: Problem

    def next_start(self, results: Results) -> StartPlan | None:
        return None if unmeasured_objective(results, self.problem) else self.design.next_start(results)

    def next_step(self, results: Results, start: Start) -> Step | None:
        return None if unmeasured_objective(results, self.problem) else self.design.next_step(results, start)


class Watcher:
    """Passes events on; keeps Optuna's record and the expected time up to date.

    `pace` holds until this study has measured its own, `began_s` is when this run began.
    """

    def __init__(
        self,
        events: Events,
        record: Record,
        design: SweepDesign,
        pace: Pace,
        before: Results,
        clock: Clock,
        began_s: float,
    ) -> None:
        self._events = events
        self._record = record
        self._design = design
        self._pace = pace
        self._clock = clock
        self._began_s = began_s
        self._earlier_s = before.elapsed_s
        self._starts_before = len(before.starts)
        self.results = Results(list(before.starts), list(before.rounds), before.elapsed_s)

    @property
    def elapsed_s(self) -> float:
        """Of all runs."""
        return self._earlier_s + self._clock.monotonic_s() - self._began_s

    def tell_expected(self) -> None:
        """What the whole run takes, what is over included."""
        self.results.elapsed_s = self.elapsed_s
        pace = measured(self.results, "as measured so far") or self._pace
        found = expect(self._design.outlook(self.results), pace, self._design.left_s(self.results))
        made = len(self.results.starts) - self._starts_before
        if found.starts:
            spent_s = self.elapsed_s - self._earlier_s
            self._events.expected(made + found.starts, spent_s + found.seconds, found.sentence)

    def expected(self, starts: int | None, seconds: float | None, text: str = "") -> None:
        self._events.expected(starts, seconds, text)

    def start_began(self, number: int, plan: StartPlan) -> None:
        self._events.start_began(number, plan)

    def start_ready(self, start: Start) -> None:
        self._events.start_ready(start)

    def round_began(self, start: Start, step: Step, attempt: int) -> None:
        self._events.round_began(start, step, attempt)

    def round_progress(self, done: int, total: int) -> None:
        self._events.round_progress(done, total)

    def round_ended(self, row: Round, named: Named) -> None:
        self.results.rounds.append(row)
        self._record.note(row)
        self._events.round_ended(row, named)

    def start_ended(self, start: Start) -> None:
        self.results.starts.append(start)
        self._events.start_ended(start)
        if start.state != "interrupted":
            self.tell_expected()

    def stage(self, text: str) -> None:
        self._events.stage(text)

    def message(self, text: str, *, routine: bool = False) -> None:
        self._events.message(text, routine=routine)
