"""What a sweep would start, without starting anything: for `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tuner.clock import Clock
from tuner.domain.experiment import Results
from tuner.domain.setting import STOCK, Setting
from tuner.engine.launch import command_line
from tuner.experiment.design import Named, StartPlan
from tuner.experiment.session import engine_spec
from tuner.experiment.store import Store
from tuner.study.design import SweepDesign
from tuner.study.expected import Expected, expect, measured
from tuner.study.opening import check_continuable
from tuner.study.problem import Problem
from tuner.study.record import Record
from tuner.study.storage import StorageAddress
from tuner.study.sweep import Prepared


@dataclass(frozen=True)
class PlannedStart:
    """One engine start of the search. Port 0 stands for the free port that is taken at the start."""

    label: str
    live: bool
    settings: list[str]
    """Labels of the settings measured on it, as far as they are known before; stock is one of them."""
    command: list[str]


@dataclass(frozen=True)
class Preview:
    """The starts of the search in order, what comes after them, and how long all of it takes."""

    first_line: str
    starts: list[PlannedStart]
    then: list[str]
    """The starts whose settings are known only after the search, in sentences."""
    infeasible: dict[str, str]
    """Label of a setting that is refused before any start, and why."""
    expected: Expected


def preview(prepared: Prepared, clock: Clock) -> Preview:
    """UsageError for a study that could not be continued. Nothing is written."""
    request, problem = prepared.request, prepared.problem
    store = Store(prepared.path)
    check_continuable(store, request.profile, prepared.fingerprint, prepared.design, seed=request.seed)
    results = store.results()
    address = StorageAddress(store.journal_file, request.storage_url)
    record = Record(address, store.path.name, request.profile, problem, results, seed=request.seed, clock=clock)
    design = SweepDesign(problem, record)
    plans = list(_plans(problem, record, design, results))
    pace = measured(results, "as measured so far") or prepared.pace
    expected = expect(design.outlook(results), pace, design.left_s(results))
    return Preview(
        first_line=prepared.first_line,
        starts=[_planned(prepared, plan, store) for plan in plans],
        then=_then(problem) if expected.starts > len(plans) else [],
        infeasible={setting.label: sentence for setting, _, sentence in problem.infeasible},
        expected=expected,
    )


def _then(problem: Problem) -> list[str]:
    if not problem.live:
        return ["final starts: three for each of the winner, the runner-up and stock"]
    each = " for each group of boot options still in question" if len(problem.groups) > 1 else ""
    return [
        f"final starts: three{each}, with the winner, the runner-up and stock",
        "literal start: one with the frozen command, without live control",
    ]


def _plans(problem: Problem, record: Record, design: SweepDesign, results: Results) -> Iterator[StartPlan]:
    """The starts of the search; of a study that is under way only the next one."""
    if results.starts:
        plan = design.next_start(results)
        yield from [plan] if plan is not None else []
    elif problem.live:
        for group in problem.groups:
            plan = SweepDesign(replace(problem, groups=(group,)), record).next_start(Results())
            yield from [plan] if plan is not None else []
    else:
        for setting in [STOCK, *problem.references, *_listed(problem)]:
            named = Named(record.id_of(setting), setting)
            args = setting.engine_args(problem.base_args)
            yield StartPlan("single", setting.label, args, (named,), live=False, reuse_budget=setting.reuse_budget)


def _listed(problem: Problem) -> list[Setting]:
    return [setting for group in problem.groups for setting in group.settings][: problem.max_settings]


def _planned(prepared: Prepared, plan: StartPlan, store: Store) -> PlannedStart:
    request = prepared.request
    spec = engine_spec(request.profile, request.choice, plan, store.engine_log(1), store.record_dir)
    labels = [named.setting.label for named in plan.settings]
    return PlannedStart(plan.label or plan.purpose, plan.live, labels, command_line(spec, 0))
