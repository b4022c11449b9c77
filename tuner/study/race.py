"""The race within the search: after fixed numbers of cycles, settings that cannot win are measured no more. Pure.

The tests compare settings within the starts of the search: differences of the same cycles, whose variance is that
of the setting itself moderated by the one of all settings tested together. Their bounds hold for all settings and
stages at once with a probability of 1 - `MISS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import special

from tuner.domain.experiment import STOCK_ID, SettingId
from tuner.measure.contrast import PRIOR_DF, SETTING_START_SD, START_SD, Matrix, Panel, Scale
from tuner.study.estimate import COUNTS, Evidence, rank
from tuner.study.problem import Problem

ZONE = 0.03
"""A gain over stock that is smaller than this is not looked for; the verdict does not use it."""
SLACK = 0.015
"""A setting goes when it cannot be better than the leader by more than this."""
PRECISE = 0.75 * SETTING_START_SD
"""Standard error of a difference below which more cycles of the same start tell nothing about other starts."""
MISS = 0.20
"""Probability, over all settings and stages together, that a bound is wrong."""
UNLIKELY = 0.10
"""A setting that meets a limit with a smaller probability goes."""
LIKELY = 0.5
"""The leader meets every limit with at least this probability, where some setting does."""
REACH = 0.5
"""Of neighbours, on the logarithm of the chunk size."""
MISFIT = 0.015
"""How far the objective may be from a line through its neighbours, relative."""
FINALISTS = 2
"""Settings that the finals tell apart, stock aside."""
_GROWTH = 1.5
_STAGES = 6
_POOLED_DF = 16.0
"""Most weight of the variance of all tested settings beside that of the setting itself."""


def stages(rounds: int) -> list[int]:
    """Numbers of cycles after which settings are judged, the first one `rounds`: 3, 5, 8, 12, 18, 27."""
    found = [max(rounds, 2)]
    while len(found) < _STAGES:
        found.append(math.ceil(found[-1] * _GROWTH))
    return found


@dataclass
class Race:
    """Where the settings of one group stand."""

    leader: SettingId | None = None
    """The best that likely meets the limits; None before the first stage."""
    dropped: dict[SettingId, str] = field(default_factory=dict)
    """Settings that are measured no more, with the sentence that says by what."""
    retired: set[SettingId] = field(default_factory=set)
    """Settings that went through all stages, or are known as well as one start can show."""
    judged: set[SettingId] = field(default_factory=set)
    """Settings that went through a stage."""

    def in_question(self, candidates: Collection[SettingId]) -> list[SettingId]:
        """Which of them the next cycle measures; none when the race is over: two or fewer meet in the finals anyway.

        The leader runs as long as others do.
        """
        known = {*self.dropped, *self.retired}
        alive = [c for c in candidates if c not in known and c != self.leader]
        left = len(alive) + (self.leader in candidates)
        if not alive or (left <= FINALISTS and self.judged.issuperset(alive)):
            return []
        return [c for c in candidates if c in alive or c == self.leader]


def run_race(
    evidence: Evidence, candidates: Sequence[SettingId], anchor: SettingId, labels: dict[SettingId, str]
) -> Race:
    """The race so far. `anchor` is measured in every cycle: stock, or its counterpart in a group of its own."""
    panel = evidence.panel
    columns = [panel.column[c] for c in candidates if c in panel.column]
    if not columns:
        return Race()
    state = _State(evidence.problem, panel, anchor, labels)
    ladder = stages(evidence.problem.rounds)
    counts = np.zeros(len(panel.ids), dtype=int)
    for row, present in enumerate(panel.present):
        counts += present
        alive = [c for c in columns if panel.ids[c] not in state.race.dropped]
        due = [c for c in alive if present[c] and counts[c] in ladder]
        if due:
            state.judge(row + 1, due, alive)
            state.race.judged |= {panel.ids[c] for c in due}
            state.race.retired |= {panel.ids[c] for c in due if counts[c] >= ladder[-1]}
    return state.race


class _State:
    def __init__(self, problem: Problem, panel: Panel, anchor: SettingId, labels: dict[SettingId, str]) -> None:
        self.race = Race()
        self._problem = problem
        self._panel = panel
        self._anchor = panel.column.get(anchor)
        self._labels = labels
        objective = problem.objective
        self._costs = [
            sign * Scale.of(panel.table(path)).to(panel.table(path))
            for path, sign in zip(objective.metrics, objective.signs, strict=True)
        ]

    def judge(self, rows: int, due: list[int], alive: list[int]) -> None:
        """One stage, on the first `rows` rows."""
        likely, why = feasibility(self._problem, self._panel, rows)
        for c in due:
            if likely[c] < UNLIKELY:
                self._drop(c, f"unlikely to meet {why[c]}")
            elif not all(np.isfinite(cost[:rows, c]).any() for cost in self._costs):
                self._drop(c, f"{self._problem.objective.metrics[0]} was not measured")
        left = [c for c in alive if self._panel.ids[c] not in self.race.dropped]
        leader = self._leader(rows, left, likely)
        if leader is None:
            return
        self.race.leader = self._panel.ids[leader]
        cycles = int(self._panel.present[:rows, due].sum(axis=0).max())
        tested = [c for c in due if c in left]
        self._compare(rows, [c for c in tested if c != leader], leader, SLACK, f"{self._name(leader)}", cycles)
        if self._panel.ids[leader] != STOCK_ID and self._stock_is_likely(likely):
            assert self._anchor is not None
            self._compare(rows, [c for c in tested if c != self._anchor], self._anchor, ZONE, "stock", cycles)

    def _stock_is_likely(self, likely: Matrix) -> bool:
        return self._anchor is not None and self._panel.ids[self._anchor] == STOCK_ID and likely[self._anchor] >= LIKELY

    def _compare(self, rows: int, tested: list[int], other: int, slack: float, name: str, cycles: int) -> None:
        """Drop those of which no objective can be better than the other's by more than `slack`."""
        bounds = [lower_bounds(cost[:rows], tested, other, MISS / _STAGES) for cost in self._costs]
        for i, c in enumerate(tested):
            if all(error[i] < PRECISE for _, error, _ in bounds):
                self.race.retired.add(self._panel.ids[c])
            if all(low[i] > -math.log1p(slack) for _, _, low in bounds):
                mean, low = bounds[0][0][i], bounds[0][2][i]
                by = f"at least {_percent(low)} worse" if low > 0 else f"at best {_percent(-low)} better"
                self._drop(c, f"{by} than {name} after {cycles} cycles (measured {_percent(mean, signed=True)})")

    def _leader(self, rows: int, alive: list[int], likely: Matrix) -> int | None:
        pool = [*alive, *([self._anchor] if self._anchor is not None and self._anchor not in alive else [])]
        pool = [c for c in pool if self._panel.present[:rows, c].sum() >= 2]
        most = max((likely[c] for c in pool), default=0.0)
        pool = [c for c in pool if likely[c] >= min(LIKELY, most)]
        fits = [Fit(cost[:rows]) for cost in self._costs]
        costs = {c: [float(fit.cautious[c]) for fit in fits] for c in pool}
        ranked = rank({c: values for c, values in costs.items() if np.isfinite(values).all()})
        return int(ranked[0]) if ranked else None

    def _name(self, column: int) -> str:
        return self._labels.get(self._panel.ids[column], str(self._panel.ids[column]))

    def _drop(self, column: int, reason: str) -> None:
        self.race.dropped.setdefault(self._panel.ids[column], reason)


@dataclass(frozen=True)
class Standing:
    """A measured setting at the end of the search."""

    id: SettingId
    costs: tuple[float, ...]
    """By objective, on its scale, lower is better: the effect within the search, and a standard error on top."""
    p: float
    """Probability that it meets every constraint."""


def standings(evidence: Evidence, chunks: Mapping[SettingId, tuple[str, int]]) -> dict[SettingId, Standing]:
    """Of every setting with a value of the objective, in the order in which they were first measured.

    `chunks` has the family of each setting, those that differ in the chunk size alone, and its chunk size: what
    neighbours show counts too (see `with_neighbours`).
    """
    panel, objective = evidence.panel, evidence.problem.objective
    if not panel.ids:
        return {}
    cautious = []
    for path, sign in zip(objective.metrics, objective.signs, strict=True):
        fit = Fit(sign * evidence.scale(path).to(panel.table(path)))
        effects, errors = fit.effects.copy(), fit.errors.copy()
        for family in {name for name, _ in chunks.values()}:
            members = [i for i, n in enumerate(panel.ids) if chunks.get(n, ("", 0))[0] == family]
            members = [i for i in members if np.isfinite(effects[i])]
            x = np.log([chunks[panel.ids[i]][1] for i in members])
            effects[members], errors[members] = with_neighbours(x, effects[members], errors[members])
        cautious.append(effects + errors)
    table = np.array(cautious)
    return {
        name: Standing(name, tuple(float(v) for v in table[:, i]), evidence.p_feasible(name))
        for i, name in enumerate(panel.ids)
        if np.isfinite(table[:, i]).all()
    }


def with_neighbours(x: Matrix, values: Matrix, errors: Matrix) -> tuple[Matrix, Matrix]:
    """Values at points, each combined with what a line through its neighbours within `REACH` predicts for it.

    Each counts by its variance; the prediction has `MISFIT` on top. So noisy values lean on their neighbours, and
    precise ones stand for themselves. Returns values and standard errors.
    """
    found, left = values.copy(), errors.copy()
    for i in range(len(x)):
        distance = np.abs(x - x[i])
        near = (distance < REACH) & (np.arange(len(x)) != i)
        if near.sum() < 2:
            continue
        weights = (1 - (distance[near] / REACH) ** 3) ** 3 / (errors[near] ** 2 + MISFIT**2)
        design = np.stack([np.ones(int(near.sum())), x[near] - x[i]], axis=1)
        normal = np.linalg.pinv(design.T @ (design * weights[:, None]))
        predicted = float((normal @ (design.T @ (weights * values[near])))[0])
        own, theirs = 1 / max(errors[i] ** 2, 1e-12), 1 / (float(normal[0, 0]) + MISFIT**2)
        found[i] = (own * values[i] + theirs * predicted) / (own + theirs)
        left[i] = (own + theirs) ** -0.5
    return found, left


class Fit:
    """A table of rows and columns as a sum of both: the effect of each column, whatever rows it was measured in.

    Where no row has two columns, effects are plain means: nothing is paired.
    """

    def __init__(self, table: Matrix) -> None:
        self._table = table
        self._there = np.isfinite(table)
        self.counts = self._there.sum(axis=0)

    @cached_property
    def effects(self) -> Matrix:
        """Of each column, around 0; NaN for a column without a value. Least squares."""
        if (self._there.sum(axis=1) < 2).all():
            with np.errstate(invalid="ignore"):
                return np.asarray(np.where(self._there, self._table, 0.0).sum(axis=0) / self.counts)
        there = self._there.astype(np.float64)
        used = there.sum(axis=1) > 0
        there, values = there[used], np.where(self._there, self._table, 0.0)[used]
        sizes = there.sum(axis=1)
        left = np.diag(there.sum(axis=0)) - there.T @ (there / sizes[:, None])
        right = (there * (values - (values.sum(axis=1) / sizes)[:, None])).sum(axis=0)
        found = np.linalg.lstsq(left, right, rcond=1e-9)[0]
        return np.asarray(np.where(self.counts > 0, found, np.nan), dtype=np.float64)

    @cached_property
    def errors(self) -> Matrix:
        """Standard error of each effect, from its residuals moderated by all residuals."""
        residuals = self._table - self.effects
        if (self._there.sum(axis=1) > 1).any():
            sizes = np.maximum(self._there.sum(axis=1, keepdims=True), 1)
            residuals = residuals - np.nansum(residuals, axis=1, keepdims=True) / sizes
        squares, df = np.nansum(residuals**2, axis=0), np.maximum(self.counts - 1, 0)
        pooled = squares.sum() / max(1, df.sum())
        variance = (_POOLED_DF * pooled + squares) / (_POOLED_DF + df)
        return np.asarray(np.sqrt(variance / np.maximum(self.counts, 1)), dtype=np.float64)

    @property
    def cautious(self) -> Matrix:
        """Effects plus a standard error: a setting measured seldom does not lead by luck alone."""
        return self.effects + self.errors


def lower_bounds(table: Matrix, columns: list[int], other: int, miss: float) -> tuple[Matrix, Matrix, Matrix]:
    """Mean of column minus other, its standard error, and its lower bound, which is simultaneous over the columns.

    NaN, infinite and -infinite where the two have fewer than two rows in common.
    """
    differences = table[:, columns] - table[:, [other]]
    counts = np.isfinite(differences).sum(axis=0)
    enough = counts >= 2
    if not enough.any():
        return np.full(len(columns), np.nan), np.full(len(columns), np.inf), np.full(len(columns), -np.inf)
    kept = differences[:, enough]
    means, n = np.nanmean(kept, axis=0), counts[enough]
    squares = np.nansum((kept - means) ** 2, axis=0)
    pooled = squares.sum() / (n - 1).sum()
    # No more weight than there are degrees of freedom in the others.
    weight = np.minimum(_POOLED_DF, (n - 1).sum() - (n - 1))
    df = weight + n - 1
    variance = (weight * pooled + squares) / df
    errors = np.sqrt(variance / n)
    mean, error, low = (np.full(len(columns), v) for v in (np.nan, np.inf, -np.inf))
    mean[enough], error[enough] = means, errors
    low[enough] = means - special.stdtrit(df, 1 - miss / len(columns)) * errors
    return mean, error, low


def feasibility(problem: Problem, panel: Panel, rows: int) -> tuple[Matrix, list[str]]:
    """Of each column: probability that it meets the constraint which it meets least likely, and that constraint.

    As `Evidence.p_feasible`, on the first rows of the search, for all columns at once. Limits on memory are left to
    starts of their own, metrics that were never measured count as broken.
    """
    lowest = np.ones(len(panel.ids))
    worst = [""] * len(panel.ids)
    for constraint in problem.constraints:
        if constraint.metric.startswith("memory."):
            continue
        table = panel.table(constraint.metric)[:rows]
        there = np.isfinite(table)
        n = there.sum(axis=0)
        if constraint.metric in COUNTS or constraint.op == "==":
            allowed = np.vectorize(constraint.allows, otypes=[float])(np.where(there, table, 0.0)) * there
            p = allowed.sum(axis=0) / np.maximum(n, 1)
        else:
            p = _level_feasibility(table, n, constraint.limit, below=constraint.op.startswith("<"))
        p = np.where(n > 0, p, 0.0)
        for c in np.flatnonzero(p < lowest):
            worst[c] = str(constraint)
        lowest = np.minimum(lowest, p)
    return lowest, worst


def _level_feasibility(table: Matrix, n: npt.NDArray[np.int64], limit: float, *, below: bool) -> Matrix:
    scale = Scale.of(table)
    values = scale.to(table)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.nansum(values, axis=0) / n
        squares = np.nansum((values - means) ** 2, axis=0)
        pooled = squares.sum() / max(1, np.maximum(n - 1, 0).sum())
        rounds = (_POOLED_DF * pooled + squares) / (_POOLED_DF + np.maximum(n - 1, 0)) / n
        spread = np.sqrt((START_SD * (1.0 if scale.log else np.abs(means))) ** 2 + rounds)
        p = special.stdtr(PRIOR_DF, (scale.limit(limit) - means) / spread)
    return np.asarray(p if below else 1 - p)


def _percent(value: float, *, signed: bool = False) -> str:
    return f"{math.expm1(value):{'+' if signed else ''}.1%}".replace("%", " %")
