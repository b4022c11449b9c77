"""Intervals by a bootstrap in levels: rounds of one start, requests within them.

Rounds are drawn with replacement, and the statistic is the median of the drawn rounds (Davison and
Hinkley, "Bootstrap Methods and their Application", 1997, 3.8). Requests are drawn within their rounds.
Three refinements keep it honest and fast:

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from tuner.domain.measurement import Interval
from tuner.measure.contrast import student_quantile
from tuner.measure.percentiles import QUANTILES, Values, rank
from tuner.measure.samples import Sample

DRAWS = 2000
_LEVEL = 0.95


@dataclass(frozen=True)
class RoundValue:
    """One round's value of a metric, with the requests behind it where they are at hand."""

    value: float
    sample: Sample | None = None


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
    """`draws` medians over rounds drawn with replacement."""
    values = np.array([r.value for r in rounds])
    picks = rng.integers(0, len(rounds), (draws, len(rounds)))
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


def stretch(rounds: int) -> float:
    """How much wider than a plain percentile interval: sqrt(n / (n - 1)) * t(n - 1) / z; 1 for a single round."""
    if rounds < 2:
        return 1.0
    tail = 0.5 + _LEVEL / 2
    return math.sqrt(rounds / (rounds - 1)) * student_quantile(tail, rounds - 1) / float(special.ndtri(tail))


def interval(point: float, draws: Values, factor: float) -> Interval:
    """The percentile interval of the draws, its ends moved away from the point by the factor."""
    low, high = np.quantile(draws, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return (point - factor * max(0.0, point - float(low)), point + factor * max(0.0, float(high) - point))


def seed_of(*parts: object) -> np.random.Generator:
    """A generator of its own for each question: the same data give the same interval, always."""
    text = "\0".join(map(str, parts)).encode()
    return np.random.default_rng(list(text))
