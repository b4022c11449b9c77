"""What `live.py` measures, and what it makes of its rounds: equivalence of ratios, offset of the level, order. Pure.

A block has one fresh start of each setting and one live start, all with the same arrivals. Blocks are the unit of
replication; everything is paired within them, on the log scale.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scipy import stats

from tuner.domain.experiment import Results, SettingId, Start
from tuner.domain.measurement import metric
from tuner.domain.setting import CHUNK_KNOB, Scalar
from tuner.experiment.design import Named, StartPlan, Step, StudyStopped

MARGIN = math.log(1.05)
ALPHA = 0.05
FAILURES_ALLOWED = 2
"""Starts of one setting in one block that may fail."""

Levels = dict[SettingId, dict[int, float]]
"""By setting and block: the mean of the logarithm of a metric over the rounds of a start."""


@dataclass(frozen=True)
class Blocks:
    """The design: in each block a fresh start of every setting, stock included, and a live start, in random order."""

    base_args: dict[str, Scalar]
    named: tuple[Named, ...]
    blocks: int
    rounds: int
    """Of each setting on each start."""
    seed: int = 0
    stock_chunk: int = 2048
    """What vLLM takes as chunk size on a CPU when it is not told any."""
    stop_after_s: float = math.inf
    """Of this run: no start begins later."""

    def next_start(self, results: Results) -> StartPlan | None:
        """The first start that has not completed; StudyStopped when it has failed too often."""
        if results.elapsed_s >= self.stop_after_s:
            return None
        for plan in self.plans():
            tries = [start for start in results.starts if start.label == plan.label and start.state != "interrupted"]
            if any(start.state == "completed" for start in tries):
                continue
            if len(tries) > FAILURES_ALLOWED:
                raise StudyStopped(tries[-1])
            return plan
        return None

    def next_step(self, results: Results, start: Start) -> Step | None:
        done = len(results.kept(starts=[start.number]))
        plan = next(plan for plan in self.plans() if plan.label == start.label)
        if done == self.rounds * len(plan.settings):
            return None
        cycle, position = divmod(done, len(plan.settings))
        drawn = random.Random(f"{self.seed}/{plan.label}/{cycle}").sample(plan.settings, len(plan.settings))
        return Step(drawn[position], self.block_of(start) * self.rounds + cycle, position)

    def plans(self) -> Iterator[StartPlan]:
        """Every start, in the order in which they are made."""
        for block in range(self.blocks):
            plans = [self._fresh(block, named) for named in self.named]
            yield from random.Random(f"{self.seed}/{block}").sample([*plans, self._live(block)], len(plans) + 1)

    def block_of(self, start: Start) -> int:
        return int(start.label.split(":")[0].removeprefix("block "))

    def _fresh(self, block: int, named: Named) -> StartPlan:
        return StartPlan(
            "single",
            f"block {block}: {named.id}",
            named.setting.engine_args(self.base_args),
            (named,),
            live=False,
            reuse_budget=named.setting.reuse_budget,
        )

    def _live(self, block: int) -> StartPlan:
        untold = self.base_args.get(CHUNK_KNOB, self.stock_chunk)
        chunks = [untold, *(named.setting.chunk for named in self.named)]
        largest: dict[str, Scalar] = {CHUNK_KNOB: max(size for size in chunks if isinstance(size, int))}
        return StartPlan(
            "search",
            f"block {block}: live",
            {**self.base_args, **largest},
            self.named,
            live=True,
            live_budget=any(named.setting.reuse_budget for named in self.named),
        )


@dataclass(frozen=True)
class Interval:
    """A mean with its t interval; of logarithms, so that differences are relative changes."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided t tests of a mean difference against a margin."""

    difference: Interval
    """With its 90 % interval, which lies within the margin exactly when `p` is below 0.05."""
    p: float
    """The larger of the two tests' p values."""

    @property
    def verdict(self) -> str:
        if self.p < ALPHA:
            return "equivalent"
        return "different" if self.difference.low > MARGIN or self.difference.high < -MARGIN else "not shown"


@dataclass(frozen=True)
class Order:
    """How live switching ranks the pairs of settings that one half of the fresh starts tells apart."""

    pairs: int
    tau: float | None
    """Kendall's tau of the live order against that of the other half; None without pairs."""
    tau_fresh: float | None
    """The same of the two halves against each other: what fresh starts themselves reach."""
    disagree: tuple[tuple[SettingId, SettingId], ...]
    """Pairs that live switching ranks otherwise than the other half."""


def levels(
    results: Results, path: str, blocks: Mapping[int, int], *, live: bool, rounds: int, only: int | None = None
) -> Levels:
    """Levels of a metric on the completed live or fresh starts; `blocks` gives the block of each start number.

    A setting with fewer than `rounds` kept rounds on its start, or without the metric in one of them, is left out
    there. `only` takes that round of the start alone, from 0.
    """
    found: Levels = {}
    for start in results.starts:
        if start.live != live or start.state != "completed":
            continue
        for name in start.settings:
            values = [metric(row.measurement, path) for row in results.kept(name, starts=[start.number])]
            logs = [math.log(value) for value in values if value]
            if len(logs) == len(values) >= rounds:
                found.setdefault(name, {})[blocks[start.number]] = statistics.fmean(
                    logs if only is None else [logs[only]]
                )
    return found


def offset_of_round(live: Levels, fresh: Levels) -> list[float]:
    """In each block: how far live levels are from fresh ones, in the mean over the settings."""
    shared = [set(live[name]) & set(fresh[name]) for name in live.keys() & fresh.keys()]
    complete = set.intersection(*shared) if shared else set()
    return [statistics.fmean(live[name][block] - fresh[name][block] for name in live) for block in sorted(complete)]


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """`one` less `other` in each block that has both."""
    return [one[block] - other[block] for block in sorted(one.keys() & other.keys())]


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The mean and its t interval; infinitely wide for a single value. ValueError without any."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf, len(values))
    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * _error(values)
    return Interval(mean, mean - half, mean + half, len(values))


def equivalence(values: Sequence[float], margin: float = MARGIN) -> Equivalence:
    """Whether the mean of paired differences lies within the margin."""
    found = interval(values, 1 - 2 * ALPHA)
    if len(values) < 2:
        return Equivalence(found, 1.0)
    error = max(_error(values), 1e-12)
    distance = (margin - abs(found.mean)) / error
    return Equivalence(found, float(stats.t.sf(distance, len(values) - 1)))


def ratio_differences(live: Levels, fresh: Levels, setting: SettingId, reference: SettingId) -> list[float]:
    """In each block: the setting's ratio to the reference switched, less the same on fresh starts."""
    switched = _ratio(live, setting, reference)
    started = _ratio(fresh, setting, reference)
    return differences(switched, started)


def order(live: Levels, fresh: Levels) -> Order:
    """Pairs that the fresh starts of every other block tell apart, ranked by the rest of them and by live switching.

    The half that chooses a pair is not the one that live switching is compared with.
    """
    blocks = sorted({block for each in fresh.values() for block in each})
    chooses, judges = set(blocks[::2]), set(blocks[1::2])
    signs: list[tuple[tuple[SettingId, SettingId], int, int, int]] = []
    for one, other in combinations(sorted(fresh, key=str), 2):
        chosen = _sign(fresh, one, other, chooses, told_apart=True)
        judged = _sign(fresh, one, other, judges)
        switched = _sign(live, one, other, set(blocks))
        if chosen and judged and switched:
            signs.append(((one, other), chosen, judged, switched))
    n = len(signs)
    return Order(
        pairs=n,
        tau=sum(judged * switched for _, _, judged, switched in signs) / n if n else None,
        tau_fresh=sum(chosen * judged for _, chosen, judged, _ in signs) / n if n else None,
        disagree=tuple(pair for pair, _, judged, switched in signs if judged != switched),
    )


def together(orders: Sequence[Order]) -> Order:
    """The pairs of several loads as one."""
    n = sum(each.pairs for each in orders)
    return Order(
        pairs=n,
        tau=sum((each.tau or 0.0) * each.pairs for each in orders) / n if n else None,
        tau_fresh=sum((each.tau_fresh or 0.0) * each.pairs for each in orders) / n if n else None,
        disagree=tuple(pair for each in orders for pair in each.disagree),
    )


def _ratio(found: Levels, setting: SettingId, reference: SettingId) -> dict[int, float]:
    one, other = found.get(setting, {}), found.get(reference, {})
    return {block: one[block] - other[block] for block in one.keys() & other.keys()}


def _sign(found: Levels, one: SettingId, other: SettingId, blocks: set[int], *, told_apart: bool = False) -> int:
    """Of the mean difference in these blocks; 0 where there is none, or none that a t test sees."""
    values = [value for block, value in _ratio(found, one, other).items() if block in blocks]
    if not values:
        return 0
    seen = interval(values)
    if told_apart and seen.low <= 0 <= seen.high:
        return 0
    return (seen.mean > 0) - (seen.mean < 0)


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
