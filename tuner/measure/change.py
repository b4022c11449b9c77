"""How much a metric changed from one set of rounds to another, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.domain.measurement import Interval, Measurement, metric
from tuner.domain.observation import RoundObservation
from tuner.measure.bootstrap import DRAWS, RoundValue, interval, median_draws, seed_of, stretch, units
from tuner.measure.samples import Samples


@dataclass(frozen=True)
class Change:
    """Medians over rounds of two sides; `change` is now / baseline - 1, negative is lower.

    What cannot be said is None, with the reason.
    """

    baseline: float | None
    now: float | None
    change: float | None
    ci95: Interval | None
    reason: str = ""

    @property
    def differs(self) -> bool | None:
        """Whether the interval leaves out 'no change'; None without an interval."""
        return None if self.ci95 is None else not self.ci95[0] <= 0.0 <= self.ci95[1]


def round_values(
    rounds: Sequence[Measurement],
    path: str,
    requests: Sequence[Samples] | None = None,
    starts: Sequence[int] | None = None,
) -> list[RoundValue]:
    """The rounds that have this metric; `requests` and `starts` run parallel to `rounds`."""
    latency, _, statistic = path.rpartition(".")
    found = []
    for index, one in enumerate(rounds):
        value = metric(one, path)
        if value is None:
            continue
        sample = requests[index].get(latency) if requests is not None and statistic != "n" else None
        found.append(RoundValue(value, sample, 0 if starts is None else starts[index]))
    return found


def relative_change(
    baseline_rounds: Sequence[Measurement],
    now_rounds: Sequence[Measurement],
    path: str,
    *,
    baseline_observations: Sequence[RoundObservation] | None = None,
    now_observations: Sequence[RoundObservation] | None = None,
    baseline_starts: Sequence[int] | None = None,
    now_starts: Sequence[int] | None = None,
) -> Change:
    """The change of a metric over rounds that count; KeyError for a path that names nothing.

    With observations, requests are redrawn within their rounds; with starts (a number for each
    round), starts are redrawn first. Without an interval where both sides have one round and no
    requests. Several rounds of one start say nothing about the next start: its own noise is not in
    the interval.
    """
    before = round_values(baseline_rounds, path, _sorted_out(baseline_observations), baseline_starts)
    after = round_values(now_rounds, path, _sorted_out(now_observations), now_starts)
    return change_between(before, after, path)


def _sorted_out(observations: Sequence[RoundObservation] | None) -> list[Samples] | None:
    return None if observations is None else [Samples(o) for o in observations]


def change_between(before: Sequence[RoundValue], after: Sequence[RoundValue], path: str) -> Change:
    """`relative_change` of rounds that are sorted out already."""
    baseline = float(np.median([r.value for r in before])) if before else None
    now = float(np.median([r.value for r in after])) if after else None
    if baseline is None or now is None:
        return Change(
            baseline, now, None, None, f"no round of the {'baseline' if baseline is None else 'new side'} has it"
        )
    if baseline == 0:
        if now == 0:
            return Change(baseline, now, 0.0, None, "both are 0")
        return Change(baseline, now, None, None, "the baseline is 0: no relative change")
    change = now / baseline - 1
    if len(before) == len(after) == 1 and before[0].sample is None and after[0].sample is None:
        return Change(baseline, now, change, None, "one round a side, and no requests to judge its spread by")
    statistic = path.rpartition(".")[2]
    rng = seed_of(path, baseline, now)
    first = median_draws(before, statistic, DRAWS, rng)
    second = median_draws(after, statistic, DRAWS, rng)
    factor = stretch([units(before), units(after)])
    if baseline > 0 and now > 0 and (first > 0).all() and (second > 0).all():
        low, high = interval(float(np.log(now / baseline)), np.log(second / first), factor)
        # The way through logarithms costs a last digit, which must not leave the point outside.
        return Change(baseline, now, change, (min(change, float(np.expm1(low))), max(change, float(np.expm1(high)))))
    low, high = interval(change, (second - first) / abs(baseline), factor)
    return Change(baseline, now, change, (low, high))
