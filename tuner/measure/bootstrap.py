"""Intervals by a bootstrap in levels: starts of the engine, rounds within them, requests within those.

Rounds are drawn with replacement, and the statistic is the median of the drawn rounds (Davison and
Hinkley, "Bootstrap Methods and their Application", 1997, 3.8; Kalibera and Jones, "Rigorous
Benchmarking in Reasonable Time", 2013, for starts, rounds and repeats of programs). Requests are drawn
within their rounds. Three refinements keep it honest and fast:

- The spread between rounds holds the spread of their requests already; drawing both in full counts
  the latter twice (the same section of Davison and Hinkley). So the requests' part is shrunk to what
  the rounds fail to show: nothing when rounds differ at least as much as their requests say, all of
  it for a single round.
- A bootstrap of few rounds is too narrow: its variance is short by (R - 1)/R and its normal quantile
  ignores that the spread itself is estimated. Distances from the point are stretched by
  sqrt(R/(R - 1)) * t/z (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, the
  expanded percentile interval, here on the scale of values since three rounds have no far quantiles).
- A percentile of n values drawn with replacement is an order statistic: its position among the
  observed values follows Beta(k, n + 1 - k) (Efron, "Bootstrap Methods", 1979, section 3). One draw
  replaces n. Values of one request move together (its token gaps), so n is divided by the design
  effect of their clusters (Woodruff, "Confidence Intervals for Medians", 1952; Kish, "Survey
  Sampling", 1965, 8.2).

`benchmarks/false_alarms.py` checks the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tuner.domain.measurement import Interval
from tuner.measure.percentiles import QUANTILES, Values, rank
from tuner.measure.samples import Sample

DRAWS = 2000
_LEVEL = 0.95


@dataclass(frozen=True)
class RoundValue:
    """One round's value of a metric, with the requests behind it where they are at hand."""

    value: float
    sample: Sample | None = None
    start: int = 0
    """Which start of the engine the round belongs to."""


def redraw(sample: Sample, statistic: str, draws: int, rng: np.random.Generator) -> Values:
    """`draws` values of a statistic (p50, p90, p99 or mean) over requests drawn with replacement."""
    values = sample.values
    if statistic == "mean":
        error = _mean_error(sample)
        return np.asarray(values.mean() + error * rng.standard_normal(draws), dtype=np.float64)
    q = QUANTILES[statistic]
    n = values.size
    ordered = np.sort(values)
    effect = _design_effect(sample, ordered[rank(n, q) - 1], q)
    size = max(1.0, n / effect)
    k = min(size, max(1.0, math.ceil(round(q * size, 9))))
    positions = rng.beta(k, size + 1 - k, draws)
    return np.asarray(ordered[np.minimum((positions * n).astype(np.int64), n - 1)], dtype=np.float64)


def _mean_error(sample: Sample) -> float:
    """Standard error of the mean by the central limit theorem, clusters included."""
    values = sample.values
    if values.size < 2:
        return 0.0
    deviations = values - values.mean()
    if sample.owners is not None:
        deviations = np.bincount(sample.owners, weights=deviations)
    return float(np.sqrt((deviations**2).sum()) / values.size)


def _design_effect(sample: Sample, threshold: float, q: float) -> float:
    """How many times the clusters inflate the variance of 'share of values up to the threshold'."""
    if sample.owners is None or sample.values.size < 2:
        return 1.0
    deviations = (sample.values <= threshold).astype(np.float64)
    deviations -= deviations.mean()
    alone = float((deviations**2).sum())
    together = float((np.bincount(sample.owners, weights=deviations) ** 2).sum())
    return max(1.0, together / alone) if alone > 0 else 1.0


def median_draws(rounds: Sequence[RoundValue], statistic: str, draws: int, rng: np.random.Generator) -> Values:
    """`draws` medians over rounds drawn with replacement (and starts, where there are several)."""
    values = np.array([r.value for r in rounds])
    picks = _picks([r.start for r in rounds], draws, rng)
    table = values[picks]
    weight = math.sqrt(_unseen_share(rounds, statistic, rng))
    for index, one in enumerate(rounds):
        here = picks == index
        if weight and one.sample is not None and one.sample.values.size:
            moves = redraw(one.sample, statistic, int(here.sum()), rng) - one.value
            table[here] += weight * moves
    return np.asarray(np.median(table, axis=1), dtype=np.float64)


def _unseen_share(rounds: Sequence[RoundValue], statistic: str, rng: np.random.Generator) -> float:
    """The share of the requests' variance that the rounds' own spread does not show, 0 to 1."""
    errors = [
        redraw(r.sample, statistic, 400, rng).var() for r in rounds if r.sample is not None and r.sample.values.size
    ]
    within = float(np.mean(errors)) if errors else 0.0
    if within == 0:
        return 0.0
    between = float(np.var([r.value for r in rounds], ddof=1)) if len(rounds) > 1 else 0.0
    return max(0.0, 1 - between / within)


def _picks(
    starts: Sequence[int], draws: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Indices of rounds, one row a draw: a start is drawn, then rounds within it, until there are as many."""
    n = len(starts)
    names = sorted(set(starts))
    if len(names) == 1:
        return rng.integers(0, n, (draws, n))
    members = [np.flatnonzero(np.asarray(starts) == name) for name in names]
    longest = max(len(m) for m in members)
    padded = np.stack([np.resize(m, longest) for m in members])
    sizes = np.array([len(m) for m in members])
    chosen = rng.integers(0, len(names), (draws, len(names)))
    spread = np.resize(np.arange(len(names)), n)
    which = chosen[:, spread]
    within = (rng.random((draws, n)) * sizes[which]).astype(np.int64)
    return np.asarray(padded[which, within], dtype=np.int64)


def units(rounds: Sequence[RoundValue]) -> int:
    """The independent units of the top level that varies: starts where there are several, else rounds."""
    starts = len({r.start for r in rounds})
    return starts if starts > 1 else len(rounds)


def stretch(sizes: Sequence[int]) -> float:
    """How much wider than a plain percentile interval: `sizes` are the units of each side.

    One side of n: sqrt(n / (n - 1)) * t(n - 1) / z. Two sides add their degrees of freedom. A side of
    one unit adds nothing, since its spread is unknown; with no other, the interval is not stretched.
    """
    known = [n for n in sizes if n > 1]
    freedom = sum(n - 1 for n in known)
    if not freedom:
        return 1.0
    n = min(known)
    tail = 0.5 + _LEVEL / 2
    return math.sqrt(n / (n - 1)) * float(stats.t.ppf(tail, freedom)) / float(stats.norm.ppf(tail))


def interval(point: float, draws: Values, factor: float) -> Interval:
    """The percentile interval of the draws, its ends moved away from the point by the factor."""
    low, high = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return (point - factor * max(0.0, point - float(low)), point + factor * max(0.0, float(high) - point))


def seed_of(*parts: object) -> np.random.Generator:
    """A generator of its own for each question: the same data give the same interval, always."""
    text = "\0".join(map(str, parts)).encode()
    return np.random.default_rng(list(text))
