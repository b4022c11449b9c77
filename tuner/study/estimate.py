"""What the starts of a study say about its settings: levels, contrasts with stock, chances to meet the limits. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.domain.experiment import STOCK_ID, Contrast, Results, Round, SettingId, SettingLine
from tuner.domain.measurement import metric, metric_names
from tuner.domain.profile import Constraint
from tuner.measure.contrast import (
    SETTING_START_SD,
    START_SD,
    Estimate,
    Matrix,
    Noise,
    Panel,
    Scale,
    difference,
    over_starts,
    round_noise,
    start_noise,
)
from tuner.measure.summary import median_over
from tuner.study.problem import Problem

COUNTS = ("failed_requests", "oom_events")
"""Metrics of which each round counts by itself: there is no level behind them."""
UNDECIDED = 0.9
"""Probability given to a limit on memory that the shared start exceeds: a start of the setting's own decides."""

Known = dict[tuple[int, int, str], float]
"""Values by start, round and metric: reading them anew at each step would cost more than all else."""


@dataclass(frozen=True)
class Check:
    """One constraint and one setting."""

    constraint: Constraint
    p: float
    """Probability that the setting meets it."""
    level: float | None
    """In the metric's own unit; None when it was not measured."""
    reason: str = ""
    """Why there is no level."""

    @property
    def text(self) -> str:
        """`itl_ms.p99 <= 250 (about 588)`."""
        return f"{self.constraint} ({self.reason or f'about {self.level:.3g}'})"


class Evidence:
    """The kept rounds of some starts.

    `more_starts` are starts whose rounds are used beside them to estimate the noise of rounds, and the levels that
    constraints are held against: nothing was chosen for its luck with a limit. `final` says that counts such as
    `failed_requests` are taken literally: one round that breaks the limit is enough.
    """

    def __init__(
        self,
        problem: Problem,
        results: Results,
        starts: Collection[int],
        *,
        more_starts: Collection[int] = (),
        final: bool = False,
        known: Known | None = None,
    ) -> None:
        self.problem = problem
        self.final = final
        self._rounds = [r for r in results.rounds if r.kept and r.start in starts]
        self.panel = Panel(self._rounds, known)
        more = [r for r in results.rounds if r.kept and r.start in more_starts and r.start not in starts]
        self._all = Panel([*self._rounds, *more], known) if more else self.panel
        self._start_noises: dict[tuple[SettingId, str], Noise | None] = {}
        self._scales: dict[str, Scale] = {}
        own = {s.number for s in results.starts if not s.live}
        self._own = [r for r in results.rounds if r.kept and r.start in own]

    @property
    def ids(self) -> list[SettingId]:
        return self.panel.ids

    def rounds(self, name: SettingId) -> list[Round]:
        return [r for r in self._rounds if r.setting == name]

    def scale(self, path: str) -> Scale:
        if path not in self._scales:
            self._scales[path] = Scale.of(self._all.table(path))
        return self._scales[path]

    def level(self, name: SettingId, path: str) -> Estimate | None:
        """On the scale of `path`; None where the setting was not measured in these starts, or the metric was not."""
        return self._level(self.panel, name, path)

    def _level(self, panel: Panel, name: SettingId, path: str) -> Estimate | None:
        scale = self.scale(path)
        groups = panel.by_start(scale.to(_column(panel, name, path)))
        if not groups:
            return None
        noise = round_noise(self._all.by_start(scale.to(_column(self._all, name, path))))
        mean = float(np.mean([g.mean() for g in groups]))
        return over_starts(groups, START_SD * (1.0 if scale.log else abs(mean)), rounds=noise)

    def contrast(self, one: SettingId, other: SettingId, path: str) -> Estimate | None:
        """`one` minus `other` on the scale of `path`, paired where they were measured in the same cycles."""
        columns = self.panel.column
        if one not in columns or other not in columns:
            return None
        scale = self.scale(path)
        groups = self._paired(self.panel, one, other, path, scale)
        if not groups:
            a, b = self.level(one, path), self.level(other, path)
            return None if a is None or b is None else difference(a, b)
        noise = round_noise(self._paired(self._all, one, other, path, scale))
        shift = 1.0 if scale.log else abs(float(np.nanmean(scale.to(_column(self.panel, other, path)))))
        prior = math.sqrt(2) * SETTING_START_SD * shift
        return over_starts(groups, prior, rounds=noise, starts=self._start_noise(other, path))

    def _start_noise(self, other: SettingId, path: str) -> Noise | None:
        """What starts add to the differences from `other`, over all settings."""
        key = (other, path)
        if key not in self._start_noises:
            scale, sides = self.scale(path), []
            for name in self.ids if len(np.unique(self.panel.starts)) > 1 else ():
                if name != other:
                    noise = round_noise(self._paired(self._all, name, other, path, scale))
                    sides.append((self._paired(self.panel, name, other, path, scale), noise))
            self._start_noises[key] = start_noise(sides)
        return self._start_noises[key]

    def paired_variance(self, one: SettingId, other: SettingId, path: str) -> float | None:
        """Variance of the difference of one cycle; None without two cycles in one start."""
        noise = round_noise(self._paired(self._all, one, other, path, self.scale(path)))
        return None if noise is None else noise.variance

    @staticmethod
    def _paired(panel: Panel, one: SettingId, other: SettingId, path: str, scale: Scale) -> list[Matrix]:
        return panel.by_start(scale.to(_column(panel, one, path)) - scale.to(_column(panel, other, path)))

    # --- the objective ---

    def gains(self, name: SettingId, reference: SettingId) -> list[Estimate] | None:
        """By objective: how much better than the reference, positive is better; None where one was not measured."""
        found = []
        objective = self.problem.objective
        for path, sign in zip(objective.metrics, objective.signs, strict=True):
            estimate = self.contrast(name, reference, path) if name != reference else Estimate(0.0, 0.0, 1.0)
            if estimate is None or self.level(name, path) is None:
                return None
            found.append(Estimate(-sign * estimate.value, estimate.se, estimate.df))
        return found

    def ranked(self, names: Iterable[SettingId]) -> list[SettingId]:
        """Best first: see `rank`. Settings without a value of the objective are left out."""
        pool = list(names)
        reference = STOCK_ID if STOCK_ID in self.ids else next(iter(pool), None)
        if reference is None:
            return []
        costs = {n: [-g.value for g in gains] for n in pool if (gains := self.gains(n, reference)) is not None}
        return rank(costs)

    # --- the constraints ---

    def checks(self, name: SettingId) -> list[Check]:
        """Every constraint of the problem."""
        return [self._check(name, constraint) for constraint in self.problem.constraints]

    def p_feasible(self, name: SettingId) -> float:
        """Probability that the setting meets every constraint: that of the one which it meets least likely.

        Latencies of one start move together, so that their product would count the same noise several times.
        """
        if name not in self.panel.column:
            return 0.0
        return min((check.p for check in self.checks(name)), default=1.0)

    def _check(self, name: SettingId, constraint: Constraint) -> Check:
        path = constraint.metric
        if path.startswith("memory."):
            return self._memory(name, constraint)
        values = _finite(_column(self.panel, name, path))
        if not values.size:
            return Check(constraint, 0.0, None, self._why_not(name, path))
        if path in COUNTS or constraint.op == "==":
            share = float(np.mean([constraint.allows(v) for v in values]))
            worst = float(max(values, key=constraint.excess))
            return Check(constraint, float(share == 1.0) if self.final else share, worst)
        scale, level = self.scale(path), self._level(self._all, name, path)
        assert level is not None
        p = level.below(scale.limit(constraint.limit))
        return Check(constraint, p if constraint.op.startswith("<") else 1 - p, scale.back(level.value))

    def _memory(self, name: SettingId, constraint: Constraint) -> Check:
        """Decided on starts of the setting's own; a shared one, made for the largest chunk, can only clear it."""
        own = [
            v for r in self._own if r.setting == name and (v := metric(r.measurement, constraint.metric)) is not None
        ]
        shared = [float(v) for v in _finite(_column(self.panel, name, constraint.metric))]
        values = own or shared
        if not values:
            return Check(constraint, 0.0, None, self._why_not(name, constraint.metric))
        worst = max(values, key=constraint.excess)
        return Check(
            constraint, float(constraint.allows(worst)) if own or constraint.allows(worst) else UNDECIDED, worst
        )

    def _why_not(self, name: SettingId, path: str) -> str:
        reasons = (r.measurement.unmeasured.get(path.partition(".")[0]) for r in self.rounds(name))
        why = next((reason for reason in reasons if reason), "")
        return f"not measured: {why}" if why else "not measured"


def rank(costs: Mapping[SettingId, Sequence[float]]) -> list[SettingId]:
    """Lowest cost first. Two costs: by the distance to the ideal point, each scaled to its span over all settings,
    so that the first is always on the Pareto front. Ties keep their order."""
    if not costs:
        return []
    table = np.array(list(costs.values()), dtype=np.float64)
    if table.shape[1] > 1:
        span = np.ptp(table, axis=0)
        table = (table - table.min(axis=0)) / np.where(span > 0, span, 1.0)
        table = np.hypot.reduce(table, axis=1, keepdims=True)
    names = list(costs)
    return [names[i] for i in np.argsort(table[:, 0], kind="stable")]


def setting_lines(problem: Problem, results: Results, starts: Sequence[int] | None = None) -> list[SettingLine]:
    """One line for each setting with a kept round in these starts (all when None); `state` is always `measured`.

    `ci95` is the interval of the level over starts, `vs_stock` that of the ratio to stock.
    """
    chosen = [s.number for s in results.starts] if starts is None else starts
    search = results.numbers("search", states=("completed", "engine_failed", "interrupted", "load_failed"))
    evidence = Evidence(problem, results, chosen, more_starts=search, final=_all_final(results, chosen))
    settings = dict(results.settings())
    lines = []
    for name in evidence.ids:
        rounds = evidence.rounds(name)
        median = median_over([r.measurement for r in rounds])
        paths = [p for p in _paths(rounds) if metric(median, p) is not None]
        setting = settings.get(name, problem.stock)
        intervals = {p: _interval(evidence, name, p, metric(median, p)) for p in paths}
        contrasts = {p: contrast_of(evidence, name, p) for p in paths}
        lines.append(
            SettingLine(
                id=name,
                label=setting.label,
                knobs=setting.flat(),
                state="measured",
                starts=len({r.start for r in rounds}),
                rounds=len(rounds),
                median=median,
                ci95={p: found for p, found in intervals.items() if found is not None},
                vs_stock={p: found for p, found in contrasts.items() if found is not None},
                p_feasible=evidence.p_feasible(name),
            )
        )
    return lines


def contrast_of(evidence: Evidence, name: SettingId, path: str, other: SettingId = STOCK_ID) -> Contrast | None:
    """A setting against stock as relative change; None for stock itself and where there is none."""
    estimate = None if name == other else evidence.contrast(name, other, path)
    reference = evidence.level(other, path)
    if estimate is None or reference is None:
        return None
    scale = evidence.scale(path)
    found = [scale.change(v, reference.value) for v in (estimate.value, *estimate.interval())]
    change, low, high = found
    if change is None or low is None or high is None:
        return None
    return Contrast(change=change, ci95=(low, high))


def _interval(evidence: Evidence, name: SettingId, path: str, median: float | None) -> tuple[float, float] | None:
    level = evidence.level(name, path)
    if level is None or median is None:
        return None
    low, high = (evidence.scale(path).back(v) for v in level.interval())
    # The median of rounds that lie askew may be outside the interval of their mean on the scale.
    return min(low, median), max(high, median)


def _paths(rounds: Sequence[Round]) -> list[str]:
    groups = sorted({name for r in rounds for name in r.measurement.groups})
    paths = [p for p in metric_names() if not p.endswith(".n") and p not in COUNTS]
    return paths + [f"groups.{name}.{stat}" for name in groups for stat in ("p50", "p90")]


def _all_final(results: Results, starts: Collection[int]) -> bool:
    return all(s.purpose in ("final", "literal") for s in results.starts if s.number in starts)


def _column(panel: Panel, name: SettingId, path: str) -> Matrix:
    if name not in panel.column:
        return np.full(len(panel.rows), np.nan)
    return panel.table(path)[:, panel.column[name]]


def _finite(values: Matrix) -> Matrix:
    return values[np.isfinite(values)]
