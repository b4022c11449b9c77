"""Estimates from rounds within engine starts: levels of settings, and differences between them. Pure.

The model, on the logarithm of a metric where every value is above 0, else on the metric itself:

    value = setting + start + setting at this start + cycle + round

Settings measured in one start are compared within its cycles, so that what a start or a cycle has in common drops
out. Starts are the unit of replication: the estimate is the mean over starts of what each of them shows, and its
variance is that of one start's mean, divided by the starts. That variance has two parts. The noise of rounds is
estimated from all differences within starts. What starts add to it can hardly be learned from three of them, so
that part is a compromise between what they show and a prior worth `PRIOR_DF` starts (a moderated variance, as in
Smyth, "Linear Models and Empirical Bayes Methods", 2004): `START_SD` for the level of a start, `SETTING_START_SD`
for the deviation of one setting in one start. Degrees of freedom follow Satterthwaite. Without the prior a
difference over three starts would need four times its standard error; with it, starts that differ more than the
prior says still widen the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special

from tuner.domain.experiment import Round, SettingId
from tuner.domain.measurement import Interval, metric

START_SD: Final = 0.03
"""What a restart changes for every setting alike, relative: the prior."""
SETTING_START_SD: Final = 0.01
"""What a restart changes for one setting beyond the others, relative: the prior."""
PRIOR_DF: Final = 3.0

Matrix = npt.NDArray[np.float64]


def student_quantile(share: float, df: float) -> float:
    """The quantile of Student's distribution."""
    return float(special.stdtrit(min(df, 1e6), share))


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and the degrees of freedom of that."""

    value: float
    se: float
    df: float

    def quantile(self, share: float) -> float:
        """The value that the truth lies below with this probability."""
        return self.value + self.se * student_quantile(share, self.df)

    def interval(self, level: float = 0.95) -> Interval:
        """The two-sided interval."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def below(self, limit: float) -> float:
        """Probability that the truth is at most `limit`."""
        if self.se == 0:
            return 1.0 if self.value <= limit else 0.0
        return float(special.stdtr(min(self.df, 1e6), (limit - self.value) / self.se))


@dataclass(frozen=True)
class Noise:
    """An estimated variance."""

    variance: float
    df: float


@dataclass(frozen=True)
class Scale:
    """How values of a metric are compared: as logarithms, or as shares of `unit` where some are not above 0."""

    log: bool
    unit: float = 1.0

    @classmethod
    def of(cls, values: Matrix) -> Scale:
        """For all finite values of a metric."""
        finite = values[np.isfinite(values)]
        if finite.size and (finite > 0).all():
            return cls(log=True)
        middle = float(np.median(np.abs(finite))) if finite.size else 0.0
        return cls(log=False, unit=middle or 1.0)

    def to(self, values: Matrix) -> Matrix:
        return np.log(values) if self.log else values / self.unit

    def back(self, scaled: float) -> float:
        """From a level on the scale to the metric's own unit."""
        return math.exp(scaled) if self.log else scaled * self.unit

    def limit(self, value: float) -> float:
        """A limit in the metric's own unit, on the scale."""
        if self.log:
            return math.log(value) if value > 0 else -math.inf
        return value / self.unit

    def change(self, difference: float, reference: float) -> float | None:
        """A difference on the scale as relative change of `reference` (on the scale); None for a reference of 0."""
        if self.log:
            return math.expm1(difference)
        return difference / abs(reference) if reference else None


def round_noise(groups: Iterable[Matrix]) -> Noise | None:
    """The variance of values around the means of their groups; None without two in one group."""
    squares, df = 0.0, 0
    for group in groups:
        if group.size > 1:
            squares += float(((group - group.mean()) ** 2).sum())
            df += group.size - 1
    return Noise(squares / df, df) if df else None


def start_noise(sides: Iterable[tuple[Sequence[Matrix], Noise | None]]) -> Noise | None:
    """What starts add to the noise of rounds; None without a side of two starts.

    A side is the values of one difference (or level) by start, with the noise of its rounds.
    """
    excess, df = 0.0, 0
    for groups, noise in sides:
        rounds = noise.variance if noise else 0.0
        means = [float(group.mean()) for group in groups if group.size]
        if len(means) > 1:
            share = float(np.mean([rounds / group.size for group in groups if group.size]))
            excess += (len(means) - 1) * (float(np.var(means, ddof=1)) - share)
            df += len(means) - 1
    return Noise(max(0.0, excess / df), df) if df else None


def over_starts(
    groups: Sequence[Matrix], prior_sd: float, *, rounds: Noise | None = None, starts: Noise | None = None
) -> Estimate | None:
    """The mean over starts of values by start, a start's weight by how sure its mean is; None without a value.

    `prior_sd` is the prior of what starts add. `rounds` and `starts` are variances estimated from more data than
    these groups; by default they are estimated from the groups alone. Values that show no noise of rounds, one a
    start, leave it in what starts add.
    """
    groups = [group for group in groups if group.size]
    if not groups:
        return None
    rounds = rounds or round_noise(groups)
    starts = starts or start_noise([(groups, rounds)])
    prior = prior_sd**2
    if starts is None:
        between = Noise(prior, PRIOR_DF)
    else:
        df = PRIOR_DF + starts.df
        between = Noise((PRIOR_DF * prior + starts.df * starts.variance) / df, df)
    sizes = np.array([group.size for group in groups], dtype=np.float64)
    noise = rounds or Noise(0.0, 1.0)
    variances = between.variance + noise.variance / sizes
    weights = 1 / variances if (variances > 0).all() else np.ones(len(groups))
    weights = weights / weights.sum()
    parts = (between.variance * float((weights**2).sum()), noise.variance * float((weights**2 / sizes).sum()))
    spread = parts[0] ** 2 / between.df + parts[1] ** 2 / noise.df
    value = float(weights @ np.array([group.mean() for group in groups]))
    return Estimate(value, math.sqrt(sum(parts)), sum(parts) ** 2 / spread if spread else between.df)


def level_interval(values_by_start: Sequence[Matrix], median: float) -> Interval | None:
    """The 95 % interval of a metric's level over starts, in its own unit; it holds `median`. None without a value."""
    groups = [group[np.isfinite(group)] for group in values_by_start]
    values = np.concatenate(groups) if groups else np.array([])
    if not values.size:
        return None
    scale = Scale.of(values)
    shift = 1.0 if scale.log else abs(float(scale.to(values).mean()))
    level = over_starts([scale.to(group) for group in groups], START_SD * shift)
    if level is None:
        return None
    low, high = (scale.back(v) for v in level.interval())
    return min(low, median), max(high, median)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """One minus other, measured apart from each other (Welch)."""
    a, b = one.se**2, other.se**2
    spread = a**2 / one.df + b**2 / other.df
    df = (a + b) ** 2 / spread if spread else one.df + other.df
    return Estimate(one.value - other.value, math.sqrt(a + b), df)


class Panel:
    """Kept rounds as tables: one row a cycle of a start, one column a setting, one table a metric."""

    def __init__(self, rounds: Sequence[Round], known: dict[tuple[int, int, str], float] | None = None) -> None:
        """`known` keeps values by start, round and metric between panels of one experiment."""
        self._rounds = [r for r in rounds if r.kept]
        self._known = {} if known is None else known
        self.ids: list[SettingId] = list(dict.fromkeys(r.setting for r in self._rounds))
        self.rows = sorted({(r.start, r.cycle) for r in self._rounds})
        self._tables: dict[str, Matrix] = {}

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """The start of each row."""
        return np.array([start for start, _ in self.rows], dtype=np.int64)

    @cached_property
    def column(self) -> dict[SettingId, int]:
        return {name: i for i, name in enumerate(self.ids)}

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Whether the setting of a column has a kept round in the cycle of a row."""
        row = {key: i for i, key in enumerate(self.rows)}
        table = np.zeros((len(self.rows), len(self.ids)), dtype=np.bool_)
        for r in self._rounds:
            table[row[r.start, r.cycle], self.column[r.setting]] = True
        return table

    def table(self, path: str) -> Matrix:
        """Values of the metric at a path, rows by cycles; NaN where there is none. The last kept round counts."""
        if path not in self._tables:
            row = {key: i for i, key in enumerate(self.rows)}
            table = np.full((len(self.rows), len(self.ids)), np.nan)
            for r in self._rounds:
                table[row[r.start, r.cycle], self.column[r.setting]] = self._value(r, path)
            self._tables[path] = table
        return self._tables[path]

    def _value(self, r: Round, path: str) -> float:
        key = (r.start, r.round, path)
        if key not in self._known:
            value = metric(r.measurement, path)
            self._known[key] = math.nan if value is None or not math.isfinite(value) else value
        return self._known[key]

    def by_start(self, values: Matrix) -> list[Matrix]:
        """The finite ones of a column, one array a start."""
        finite = np.isfinite(values)
        return [values[finite & (self.starts == start)] for start in np.unique(self.starts[finite])]
