"""The design of `regress`, `compare` and `bench`: which start and which round come next. Pure.

It goes in stages (see `verdict.py`). A stage of `regress`, or of two frozen files, adds fresh engine starts; one of
two running servers, which are measured in a single start, adds cycles to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tuner.domain.experiment import Purpose, Results, SettingId, Start
from tuner.domain.measurement import Measurement
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.domain.units import counted
from tuner.engine.policy import policy
from tuner.experiment.design import Named, StartPlan, Step, StudyStopped
from tuner.regress.verdict import Judgement

REPEATS = 3
"""Starts of a run that may fail and be made again, never two in a row."""
T = TypeVar("T")


@dataclass(frozen=True)
class Staged:
    """Starts, and cycles on each, until the verdict stands. Stages count from 1."""

    starts: Callable[[int], Sequence[StartPlan]]
    """Every start up to the end of this stage, in order."""
    cycles: Callable[[int], int]
    """Cycles on each of them, at the end of this stage."""
    judge: Callable[[Results, int], Judgement] | None = None
    """The judgement after a stage, from the results until then; None: there is one stage, and no verdict."""
    repeats: int = REPEATS

    def next_start(self, results: Results) -> StartPlan | None:
        _stop_or_repeat(results, self.repeats)
        stage = self.stage(results)
        planned, done = self.starts(stage), len(self._done(results, stage))
        return planned[done] if done < len(planned) else None

    def next_step(self, results: Results, start: Start) -> Step | None:
        if start.number in self._done(results, self.stage(results)):
            return None
        return _next_in_cycle(results, start)

    def measured(self, results: Results) -> Results:
        """The complete cycles of the starts that the verdict rests on."""
        return self._until(results, self.stage(results))

    def judged(self, results: Results) -> Judgement:
        """The verdict after the stage that the results have reached."""
        return self._judgement(results, self.stage(results))

    def outlook(self, results: Results) -> tuple[int, str]:
        """Starts in all as far as it is known, and a sentence that says why they are more than planned."""
        stage = self.stage(results)
        starts = self.starts(stage)
        several = " of each setting" if any(len(plan.settings) > 1 for plan in starts) else ""
        each = counted(self.cycles(stage), "round") + several
        why = "" if stage == 1 else f"{self._judgement(results, stage - 1).suspicion}: "
        return len(starts), f"{why}{counted(len(starts), 'start')} in all, {each} on each"

    def stage(self, results: Results) -> int:
        """The stage that the results have reached."""
        stage = 1
        while self.judge is not None and len(self._done(results, stage)) >= len(self.starts(stage)):
            if not self._judgement(results, stage).more_wanted:
                break
            stage += 1
        return stage

    def _judgement(self, results: Results, stage: int) -> Judgement:
        assert self.judge is not None, "a design without a verdict has one stage"
        return self.judge(self._until(results, stage), stage)

    def _done(self, results: Results, stage: int) -> list[int]:
        """Numbers of the starts that have all the cycles of this stage."""
        return [s.number for s in results.starts if len(complete_cycles(results, s)) >= self.cycles(stage)]

    def _until(self, results: Results, stage: int) -> Results:
        numbers = self._done(results, stage)[: len(self.starts(stage))]
        starts = [s for s in results.starts if s.number in numbers]
        kept = {(s.number, cycle) for s in starts for cycle in complete_cycles(results, s)[: self.cycles(stage)]}
        return Results(starts, [r for r in results.rounds if (r.start, r.cycle) in kept])


@dataclass(frozen=True)
class Side:
    """One of the configurations under test, and what its engine is started with."""

    named: Named
    engine_args: dict[str, Scalar]
    reuse_budget: ReuseBudget | None = None

    def start(self, purpose: Purpose) -> StartPlan:
        """A fresh start that measures this side alone."""
        return StartPlan(purpose, str(self.named.id), self.engine_args, (self.named,), False, self.reuse_budget)


def turn(members: Sequence[T], number: int) -> list[T]:
    """The order in turn `number` (from 0): A B, then B A, so that a drift cancels."""
    return list(members) if number % 2 == 0 else list(reversed(members))


def complete_cycles(results: Results, start: Start) -> list[int]:
    """The cycles of this start in which a round of each of its settings counts, in order."""
    kept: dict[int, set[SettingId]] = {}
    for row in results.kept(starts=[start.number]):
        kept.setdefault(row.cycle, set()).add(row.setting)
    return [cycle for cycle, measured in kept.items() if measured >= set(start.settings)]


def rounds_of(results: Results, setting: SettingId) -> list[list[Measurement]]:
    """The rounds of one setting that count, by start; starts that did not measure it are left out."""
    found = [[r.measurement for r in results.kept(setting, starts=[s.number])] for s in results.starts]
    return [rounds for rounds in found if rounds]


def _stop_or_repeat(results: Results, repeats: int) -> None:
    """Returns when the last start did not fail, or may be made again; else StudyStopped with the start that failed."""
    failed = [s for s in results.starts if s.state != "completed"]
    if not failed or results.starts[-1] is not failed[-1]:
        return
    last = failed[-1]
    repeatable = policy(last.cause or "") == "environment" or last.cause == "client_limited"
    twice = len(results.starts) > 1 and results.starts[-2].state != "completed"
    if not repeatable or twice or len(failed) > repeats:
        raise StudyStopped(last)


def _next_in_cycle(results: Results, start: Start) -> Step:
    """The next round of the cycle under way on this start, else the first of a new one."""
    settings = [Named(name, start.defined[str(name)]) for name in start.settings]
    rows = [r for r in results.rounds if r.start == start.number]
    if rows:
        cycle = rows[-1].cycle
        kept = {r.setting for r in rows if r.kept and r.cycle == cycle}
        for position, named in enumerate(turn(settings, cycle)):
            if named.id not in kept:
                return Step(named, cycle, position)
    cycle = results.next_cycle
    return Step(turn(settings, cycle)[0], cycle, 0)
