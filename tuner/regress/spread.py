"""How far apart rounds and engine starts lie when nothing has changed. Pure.

Rounds lie within engine starts, and starts differ among themselves (allocation, clocks, placement), so
rounds of one start are no independent evidence. Everything is computed on logarithms: a spread of 0.03
is 3 %, a change is a ratio, and swapping two sides turns its sign.

    log(round) = level + run (once the history shows it) + start (sd `start_sd`) + round (sd `round_sd`)

A few starts cannot tell their own spread, so a prior worth `start_dof` starts is added. It is dropped where
the measured spread is clearly larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

Starts = Sequence[Sequence[float]]
"""Values of one metric, above 0: rounds by start."""


RUNS_NEEDED = 5
"""Runs with the verdict ok that it takes to say that runs differ among themselves."""
_BY_CHANCE = 0.05


@dataclass(frozen=True)
class Prior:
    """What is assumed before enough is measured; relative standard deviations, weights in degrees of freedom."""

    start_sd: float = 0.03
    start_dof: float = 12.0
    round_sd: float = 0.02
    round_dof: float = 4.0
    conflict: float = 0.10
    """The prior is dropped when a measured spread as large as this one has at most this probability under it."""


@dataclass(frozen=True)
class Group:
    """The starts of one occasion (a freeze, a run), reduced to what the tests need."""

    means: tuple[float, ...]
    """Mean log value of each start."""
    rounds: tuple[int, ...]
    """Rounds behind each of them."""
    within_ss: float
    """Squared deviations of the rounds from their start's mean."""

    @property
    def starts(self) -> int:
        return len(self.means)

    @property
    def level(self) -> float:
        """Mean over the starts, each counting once."""
        return sum(self.means) / len(self.means)

    @property
    def between_ss(self) -> float:
        """Squared deviations of the starts from the level."""
        level = self.level
        return sum((m - level) ** 2 for m in self.means)

    def joined(self, other: Group) -> Group:
        """Both occasions as one."""
        return Group(self.means + other.means, self.rounds + other.rounds, self.within_ss + other.within_ss)


@dataclass(frozen=True)
class Spread:
    """The estimated spread, and how much is known about it."""

    round_sd: float
    start_sd: float
    mean_var: float
    """Variance of one start's mean over its rounds, on the log scale."""
    dof: float
    """Degrees of freedom behind `mean_var`."""
    prior_kept: bool

    @property
    def mean_sd(self) -> float:
        """Standard deviation of what one start shows, relative: what a restart alone may change."""
        return math.sqrt(self.mean_var)

    run_var: float = 0.0
    """Variance from run to run beyond that of the starts; 0 until enough runs show it."""

    def difference_sd(self, a: Group, b: Group, runs: int = 1) -> float:
        """Standard error of the difference of two levels: `a` of one run, `b` of `runs` runs."""
        starts = self.mean_var * (1.0 / a.starts + 1.0 / b.starts)
        return math.sqrt(starts + self.run_var * (1.0 + 1.0 / runs))


def group_of(starts: Starts) -> Group | None:
    """The starts that have a value; None when there is none. ValueError for a value that has no logarithm."""
    means, counts, within = [], [], 0.0
    for values in starts:
        if not values:
            continue
        if any(not v > 0 or math.isinf(v) for v in values):
            raise ValueError("a value is not above 0")
        logs = [math.log(v) for v in values]
        mean = sum(logs) / len(logs)
        means.append(mean)
        counts.append(len(logs))
        within += sum((x - mean) ** 2 for x in logs)
    return Group(tuple(means), tuple(counts), within) if means else None


def estimate_spread(groups: Sequence[Group], prior: Prior) -> Spread:
    """The spread within occasions, pooled over all of them: differences between occasions do not enter.

    `groups` holds at least one.
    """
    starts = sum(g.starts for g in groups)
    rounds = sum(sum(g.rounds) for g in groups)
    round_dof = rounds - starts
    round_var = (prior.round_dof * prior.round_sd**2 + sum(g.within_ss for g in groups)) / (prior.round_dof + round_dof)
    per_start = starts / sum(1.0 / n for g in groups for n in g.rounds)
    round_share = round_var / per_start
    expected = prior.start_sd**2 + round_share
    dof = starts - len(groups)
    between = sum(g.between_ss for g in groups)
    kept = not _conflicts(between, dof, expected, prior)
    total_dof = dof + prior.start_dof if kept else float(dof)
    mean_var = (between + (prior.start_dof * expected if kept else 0.0)) / total_dof
    return Spread(
        round_sd=math.sqrt(round_var),
        start_sd=math.sqrt(max(0.0, mean_var - round_share)),
        mean_var=mean_var,
        dof=total_dof,
        prior_kept=kept,
    )


def run_variance(earlier: Sequence[Group], spread: Spread) -> float:
    """How much whole runs differ beyond what their starts explain, from runs that were ok.

    0 with fewer than `RUNS_NEEDED` runs, or where chance alone could have spread them that far.
    """
    if len(earlier) < RUNS_NEEDED:
        return 0.0
    levels = [g.level for g in earlier]
    center = sum(levels) / len(levels)
    seen = sum((x - center) ** 2 for x in levels) / (len(levels) - 1)
    expected = spread.mean_var * sum(1.0 / g.starts for g in earlier) / len(earlier)
    chance = float(special.fdtrc(len(levels) - 1, spread.dof, seen / expected))
    return seen - expected if chance < _BY_CHANCE else 0.0


def _conflicts(between_ss: float, dof: int, expected_var: float, prior: Prior) -> bool:
    """Whether the starts differ so much more than the prior says that it is dropped."""
    if dof < 2:
        return False
    ratio = between_ss / dof / expected_var
    return bool(special.fdtrc(dof, prior.start_dof, ratio) < prior.conflict)


def upper_tail(t: float, dof: float) -> float:
    """P(T > t) of Student's distribution."""
    return float(special.stdtr(dof, -t))


def t_quantile(probability: float, dof: float) -> float:
    """Student's quantile."""
    return float(special.stdtrit(dof, probability))
