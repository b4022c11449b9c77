"""The designs of `regress`, `compare` and `bench`: which start and which round come next. Pure.

A run goes in stages (see `verdict.py`). A stage of `regress`, or of two frozen files, adds fresh engine starts; one of
two running servers adds cycles on both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tuner.domain.experiment import Purpose, Results, SettingId, Start
from tuner.domain.measurement import Measurement
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.domain.units import counted
from tuner.engine.policy import policy
from tuner.experiment.design import Named, StartPlan, Step, StudyStopped
from tuner.regress.verdict import Judgement, starts_by_stage

REPEATS = 3
"""Starts of a run that may fail and be made again, never two in a row."""

Judge = Callable[[Results, int], Judgement]
"""The judgement after stage n (from 1), from the results until then."""
T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """One of the configurations under test, and what its engine is started with."""

    named: Named
    engine_args: dict[str, Scalar]
    reuse_budget: ReuseBudget | None = None


@dataclass(frozen=True, kw_only=True)
class Staged(ABC):
    """What designs that go in stages have in common; a unit is a start, or a cycle on a running server."""

    planned: int
    """Units of each side in the first stage."""
    judge: Judge | None = None
    """None: there is one stage, and no verdict."""

    @abstractmethod
    def next_start(self, results: Results) -> StartPlan | None: ...

    @abstractmethod
    def next_step(self, results: Results, start: Start) -> Step | None: ...

    def judged(self, results: Results) -> Judgement:
        """The verdict after the stage that the results have reached."""
        return self._judgement(results, self._stage(results))

    @property
    @abstractmethod
    def starts(self) -> int | None:
        """Starts that the design takes whatever it measures; None where a stage adds some."""

    def outlook(self, results: Results) -> tuple[int, str]:
        """Starts that the run takes as far as it is known, and the sentence that goes with the number."""
        stage = self._stage(results)
        size = self._size(stage)
        if stage == 1:
            return self.starts or size, self._describe(size)
        before = self._judgement(results, stage - 1)
        return self.starts or size, f"{before.suspicion}: {self._describe(size - self._size(stage - 1), 'more ')}"

    @abstractmethod
    def _describe(self, units: int, more: str = "") -> str:
        """`6 more starts`."""

    @abstractmethod
    def _size(self, stage: int) -> int:
        """Units, of all sides, up to the end of this stage."""

    @abstractmethod
    def _done(self, results: Results) -> list[int]:
        """The numbers of the units that are complete, in order."""

    @abstractmethod
    def _only(self, results: Results, units: Sequence[int]) -> Results:
        """The results of these units."""

    def _stage(self, results: Results) -> int:
        done, stage = len(self._done(results)), 1
        while self.judge and done >= self._size(stage) and self._judgement(results, stage).more_wanted:
            stage += 1
        return stage

    def _judgement(self, results: Results, stage: int) -> Judgement:
        assert self.judge is not None, "a design without a verdict has one stage"
        return self.judge(self._only(results, self._done(results)[: self._size(stage)]), stage)


@dataclass(frozen=True, kw_only=True)
class FreshStarts(Staged):
    """Fresh engine starts until the verdict stands, each with `rounds` rounds of every setting that it measures."""

    purpose: Purpose
    sides: Callable[[int], tuple[Side, ...]]
    """The sides that stage n (from 1) measures; the first one comes first in the first pair."""
    rounds: int
    shared: StartPlan | None = None
    """A live start on which all sides are measured in turn; None: each start measures one."""

    def next_start(self, results: Results) -> StartPlan | None:
        stop_or_repeat(results)
        order, done = self._order(self._stage(results)), len(self._done(results))
        return None if done == len(order) else order[done]

    def next_step(self, results: Results, start: Start) -> Step | None:
        settings = [Named(name, start.defined[str(name)]) for name in start.settings]
        if len(complete_cycles(results, start.number, start.settings)) >= self.rounds:
            return None
        return next_in_cycle(results, start, settings)

    @property
    def starts(self) -> None:
        return None

    def _describe(self, units: int, more: str = "") -> str:
        return f"{counted(units, f'{more}start')}, {counted(self.rounds, 'round')} of each setting on each"

    def _order(self, stage: int) -> list[StartPlan]:
        """Every start up to this stage, those of a pair turn about: A B, B A."""
        order: list[StartPlan] = []
        for each in range(1, stage + 1):
            for pair in range(starts_by_stage(self.planned, each - 1), starts_by_stage(self.planned, each)):
                order += [self.shared] if self.shared else [self._plan(s) for s in turn(self.sides(each), pair)]
        return order

    def _plan(self, side: Side) -> StartPlan:
        return StartPlan(
            purpose=self.purpose,
            label=str(side.named.id),
            engine_args=side.engine_args,
            settings=(side.named,),
            live=False,
            reuse_budget=side.reuse_budget,
        )

    def _size(self, stage: int) -> int:
        return len(self._order(stage))

    def _done(self, results: Results) -> list[int]:
        return results.numbers(self.purpose)

    def _only(self, results: Results, units: Sequence[int]) -> Results:
        starts = [s for s in results.starts if s.number in units]
        return Results(starts, [r for r in results.rounds if r.start in units])


@dataclass(frozen=True, kw_only=True)
class OneStart(Staged):
    """One start, on which all settings of `plan` are measured in turn, cycle by cycle."""

    plan: StartPlan

    def next_start(self, results: Results) -> StartPlan | None:
        if not results.starts:
            return self.plan
        if results.starts[-1].state != "completed":
            raise StudyStopped(results.starts[-1])
        return None

    def next_step(self, results: Results, start: Start) -> Step | None:
        if len(self._done(results)) >= self._size(self._stage(results)):
            return None
        return next_in_cycle(results, start, self.plan.settings)

    @property
    def starts(self) -> int:
        return 1

    def _describe(self, units: int, more: str = "") -> str:
        return counted(units * len(self.plan.settings), f"{more}round")

    def _size(self, stage: int) -> int:
        return starts_by_stage(self.planned, stage)

    def _done(self, results: Results) -> list[int]:
        settings = [n.id for n in self.plan.settings]
        return complete_cycles(results, results.starts[-1].number, settings) if results.starts else []

    def _only(self, results: Results, units: Sequence[int]) -> Results:
        return Results(results.starts, [r for r in results.rounds if r.cycle in units])


def stop_or_repeat(results: Results) -> None:
    """Returns when the last start may be made again, or did not fail; StudyStopped says which start ends the run."""
    failed = [s for s in results.starts if s.state != "completed"]
    if not failed or results.starts[-1].state == "completed":
        return
    last = failed[-1]
    repeatable = policy(last.cause or "") == "environment" or last.cause == "client_limited"
    twice = len(results.starts) > 1 and results.starts[-2].state != "completed"
    if not repeatable or twice or len(failed) > REPEATS:
        raise StudyStopped(last)


def next_in_cycle(results: Results, start: Start, settings: Sequence[Named]) -> Step:
    """The next round of the cycle under way on this start, else the first of a new one."""
    rows = [r for r in results.rounds if r.start == start.number]
    if rows:
        cycle = rows[-1].cycle
        kept = {r.setting for r in rows if r.kept and r.cycle == cycle}
        for position, named in enumerate(turn(settings, cycle)):
            if named.id not in kept:
                return Step(named, cycle, position)
    cycle = results.next_cycle
    return Step(turn(settings, cycle)[0], cycle, 0)


def turn(members: Sequence[T], number: int) -> list[T]:
    """The order in turn `number` (from 0): A B, then B A, so that a drift cancels."""
    return list(members) if number % 2 == 0 else list(reversed(members))


def complete_cycles(results: Results, start: int, settings: Sequence[SettingId]) -> list[int]:
    """The cycles of this start in which a round of every one of `settings` counts, in order."""
    kept: dict[int, set[SettingId]] = {}
    for row in results.kept(starts=[start]):
        kept.setdefault(row.cycle, set()).add(row.setting)
    return [cycle for cycle, measured in kept.items() if measured >= set(settings)]


def rounds_of(results: Results, setting: SettingId) -> list[list[Measurement]]:
    """The rounds of one setting that count, by completed start; starts that did not measure it are left out."""
    found = [[r.measurement for r in results.kept(setting, starts=[n])] for n in results.numbers()]
    return [rounds for rounds in found if rounds]
