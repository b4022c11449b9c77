"""Worlds in which nights are drawn, and whole runs judged by the verdict's own functions; for `nightly.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.domain.experiment import Fingerprint
from tuner.domain.measurement import higher_is_better
from tuner.regress.history import HistoryMetric, HistoryRow, evidence_of
from tuner.regress.verdict import (
    Evidence,
    Judgement,
    Rules,
    explained_by_stock,
    judge,
    overall,
    starts_by_stage,
)

GATE = ("ttft_ms.p90", "request_throughput")
LEVEL = {"ttft_ms.p90": 100.0, "request_throughput": 40.0}
ROUNDS = 3
PLAIN_THRESHOLD = 0.10
FINGERPRINT = Fingerprint(model="m", engine="vllm")
Values = dict[str, list[list[float]]]


@dataclass(frozen=True)
class World:
    """How starts and rounds scatter; `worse` is relative by metric, 0.05 is 5 %."""

    start_sd: float = 0.03
    round_sd: float = 0.02
    day_sd: float = 0.0
    """Of whole days, that of the freeze among them."""
    two_speeds: bool = False
    """Every start runs at 0.9 or at 1.15 times the level, by chance."""

    def day(self, rng: random.Random) -> dict[str, float]:
        """What one day has in common, on the log scale."""
        return {name: rng.gauss(0, self.day_sd) if self.day_sd else 0.0 for name in GATE}

    def start(self, rng: random.Random, worse: dict[str, float], day: dict[str, float]) -> dict[str, list[float]]:
        """One fresh start: independent noise in the two metrics, the harder case for false alarms."""
        values = {}
        for name in GATE:
            own = math.log(rng.choice((0.9, 1.15))) if self.two_speeds else rng.gauss(0, self.start_sd)
            shift = worse.get(name, 0.0)
            level = LEVEL[name] * (1 - shift if higher_is_better(name) else 1 + shift)
            values[name] = [level * math.exp(own + day[name] + rng.gauss(0, self.round_sd)) for _ in range(ROUNDS)]
        return values

    def starts(
        self,
        rng: random.Random,
        count: int,
        worse: dict[str, float] | None = None,
        day: dict[str, float] | None = None,
    ) -> Values:
        """`count` starts of one day, a new one unless it is given."""
        common = self.day(rng) if day is None else day
        drawn = [self.start(rng, worse or {}, common) for _ in range(count)]
        return {name: [start[name] for start in drawn] for name in GATE}


def one_run(
    world: World,
    rng: random.Random,
    then: Values,
    history: Sequence[HistoryRow],
    planned: int,
    rules: Rules,
    worse: dict[str, float] | None = None,
    stock_then: Values | None = None,
) -> tuple[Judgement, HistoryRow, int]:
    """A whole run, with as many stages as the verdict asks for.

    `stock_then` is stock at the freeze; it is then measured beside the further starts.
    """
    now: Values = {name: [] for name in GATE}
    stock: Values = {name: [] for name in GATE}
    day = world.day(rng)
    for stage in range(1, rules.stages + 1):
        wanted = starts_by_stage(planned, stage)
        more = world.starts(rng, wanted - len(now[GATE[0]]), worse, day)
        now = {name: now[name] + more[name] for name in GATE}
        if stock_then is not None and stage > 1:
            beside = world.starts(rng, len(more[GATE[0]]), None, day)
            stock = {name: stock[name] + beside[name] for name in GATE}
        evidence = {name: evidence_of(name, then[name], now[name], history, FINGERPRINT) for name in GATE}
        verdict = judge(evidence, GATE, rules, stage=stage)
        if not verdict.more_wanted:
            break
    count = len(now[GATE[0]])
    if stock_then is not None and stock[GATE[0]]:
        verdict = _without_the_machine(verdict, then, now, stock_then, stock, rules)
    return verdict, _row(verdict, now, count), count


def _without_the_machine(
    verdict: Judgement, then: Values, now: Values, stock_then: Values, stock_now: Values, rules: Rules
) -> Judgement:
    words = []
    for name in GATE:
        word = verdict.metrics[name].verdict
        ours, stock = Evidence(then[name], now[name]), Evidence(stock_then[name], stock_now[name])
        if word in ("regressed", "inconclusive") and explained_by_stock(ours, stock, name, rules):
            word = "ok"
        words.append(word)
    return Judgement(overall(words), verdict.metrics, verdict.more_wanted)


def _row(verdict: Judgement, values: Values, starts: int) -> HistoryRow:
    return HistoryRow(
        time="",
        frozen_id="",
        verdict=verdict.verdict,
        fingerprint=FINGERPRINT,
        starts=starts,
        metrics={name: HistoryMetric.of(m) for name, m in verdict.metrics.items()},
        values=values,
    )


def plain_alarm(then: Values, now: Values) -> bool:
    """The peer: any metric of the gate more than 10 % worse than the mean at the freeze."""
    for name in GATE:
        before, after = _mean(then[name]), _mean(now[name])
        if (1 - after / before if higher_is_better(name) else after / before - 1) > PLAIN_THRESHOLD:
            return True
    return False


def _mean(starts: Sequence[Sequence[float]]) -> float:
    values = [v for start in starts for v in start]
    return sum(values) / len(values)


def two_runs(
    world: World,
    rng: random.Random,
    then: Values,
    before: Sequence[HistoryRow],
    planned: int,
    rules: Rules,
    worse: dict[str, float],
    stock_then: Values | None = None,
) -> tuple[int, int]:
    """(the run in which a regression was found, 1 or 2, or 0 for neither; starts of the first run)"""
    verdict, row, starts = one_run(world, rng, then, before, planned, rules, worse, stock_then)
    if verdict.verdict == "regressed":
        return 1, starts
    verdict, _, _ = one_run(world, rng, then, [*before, row], planned, rules, worse, stock_then)
    return (2 if verdict.verdict == "regressed" else 0), starts
