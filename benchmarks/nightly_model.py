"""Worlds in which nights are drawn, and whole nights judged by the verdict's own functions; for `nightly.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.domain.measurement import higher_is_better
from tuner.domain.experiment import Fingerprint
from tuner.regress.history import Night, NightMetric, evidence_of
from tuner.regress.verdict import (
    Evidence,
    NightVerdict,
    Rules,
    explained_by_control,
    judge_night,
    overall,
    starts_by_look,
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
    night_sd: float = 0.0
    """Of whole nights, and of the day of the freeze."""
    two_speeds: bool = False
    """Every start runs at 0.9 or at 1.15 times the level, by chance."""

    def day(self, rng: random.Random) -> dict[str, float]:
        """What one day has in common, on the log scale."""
        return {name: rng.gauss(0, self.night_sd) if self.night_sd else 0.0 for name in GATE}

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


def one_night(
    world: World,
    rng: random.Random,
    baseline: Values,
    nights: Sequence[Night],
    planned: int,
    rules: Rules,
    worse: dict[str, float] | None = None,
    control: Values | None = None,
) -> tuple[NightVerdict, Night, int]:
    """A whole night, with as many looks as the verdict asks for.

    `control` is the baseline of the stock configuration, which then runs beside the extra starts.
    """
    tonight: Values = {name: [] for name in GATE}
    stock: Values = {name: [] for name in GATE}
    day = world.day(rng)
    for look in range(1, rules.looks + 1):
        wanted = starts_by_look(planned, look)
        more = world.starts(rng, wanted - len(tonight[GATE[0]]), worse, day)
        tonight = {name: tonight[name] + more[name] for name in GATE}
        if control is not None and look > 1:
            beside = world.starts(rng, len(more[GATE[0]]), None, day)
            stock = {name: stock[name] + beside[name] for name in GATE}
        evidence = {name: evidence_of(name, baseline[name], tonight[name], nights, FINGERPRINT) for name in GATE}
        verdict = judge_night(evidence, GATE, rules, look=look)
        if not verdict.look_again:
            break
    count = len(tonight[GATE[0]])
    if control is not None and stock[GATE[0]]:
        verdict = _less_the_machine(verdict, baseline, tonight, control, stock, rules)
    return verdict, _line(verdict, tonight, count), count


def _less_the_machine(
    verdict: NightVerdict, baseline: Values, tonight: Values, control: Values, stock: Values, rules: Rules
) -> NightVerdict:
    words = []
    for name in GATE:
        word = verdict.metrics[name].verdict
        ours, theirs = Evidence(baseline[name], tonight[name]), Evidence(control[name], stock[name])
        if word in ("regressed", "inconclusive") and explained_by_control(ours, theirs, name, rules):
            word = "ok"
        words.append(word)
    return NightVerdict(overall(words), verdict.metrics, verdict.look_again)


def _line(verdict: NightVerdict, values: Values, starts: int) -> Night:
    return Night(
        at="",
        baseline_id="",
        verdict=verdict.verdict,
        fingerprint=FINGERPRINT,
        starts=starts,
        metrics={name: NightMetric.of(m) for name, m in verdict.metrics.items()},
        values=values,
    )


def plain_alarm(baseline: Values, tonight: Values) -> bool:
    """The peer: any metric of the gate more than 10 % worse than the baseline's mean."""
    for name in GATE:
        then, now = _mean(baseline[name]), _mean(tonight[name])
        if (1 - now / then if higher_is_better(name) else now / then - 1) > PLAIN_THRESHOLD:
            return True
    return False


def _mean(starts: Sequence[Sequence[float]]) -> float:
    values = [v for start in starts for v in start]
    return sum(values) / len(values)


def two_nights(
    world: World,
    rng: random.Random,
    baseline: Values,
    before: Sequence[Night],
    planned: int,
    rules: Rules,
    worse: dict[str, float],
    control: Values | None = None,
) -> tuple[int, int]:
    """(the night on which a regression was found, 1 or 2, or 0 for neither; starts of the first night)"""
    nights = list(before)
    verdict, line, starts = one_night(world, rng, baseline, nights, planned, rules, worse, control)
    if verdict.verdict == "regressed":
        return 1, starts
    verdict, _, _ = one_night(world, rng, baseline, [*nights, line], planned, rules, worse, control)
    return (2 if verdict.verdict == "regressed" else 0), starts
