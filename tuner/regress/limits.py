"""The profile's constraints, held against tonight. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Constraint
from tuner.regress.verdict import Evidence, Rules, Word, judge_metric


@dataclass(frozen=True)
class LimitVerdict:
    """One constraint tonight. `broken` with `ok` is outside the limit, but within what the baseline scatters."""

    constraint: str
    verdict: Word
    now: float | None
    broken: bool
    reason: str = ""

    @property
    def metric(self) -> str:
        """The metric that the constraint is on."""
        return self.constraint.partition(" ")[0]


def judge_limits(
    constraints: Sequence[Constraint],
    baseline: Sequence[Sequence[Measurement]],
    tonight: Sequence[Sequence[Measurement]],
    rules: Rules,
) -> list[LimitVerdict]:
    """Each constraint on the median over tonight's starts (rounds by start on both sides).

    A limit close to what was frozen is crossed on every other night by noise alone. So a broken limit is
    a regression only where the metric is significantly worse than at the freeze, or where the baseline has
    no spread to go by (no failed request then) and more than half of tonight's starts break it.
    """
    return [_judge(c, baseline, tonight, rules, max(1, len(constraints))) for c in constraints]


def _judge(
    constraint: Constraint,
    baseline: Sequence[Sequence[Measurement]],
    tonight: Sequence[Sequence[Measurement]],
    rules: Rules,
    share: int,
) -> LimitVerdict:
    text, path = str(constraint), constraint.metric
    by_start = [statistics.median(v) for v in values_by_start(tonight, path) if v]
    if not by_start:
        return LimitVerdict(text, "inconclusive", None, broken=False, reason=f"{path} was not measured tonight")
    now = statistics.median(by_start)
    if constraint.allows(now):
        return LimitVerdict(text, "ok", now, broken=False)
    evidence = Evidence(values_by_start(baseline, path), values_by_start(tonight, path))
    judged = judge_metric(path, evidence, Rules(alarm=rules.alarm, tolerance=0.0, prior=rules.prior), share=share)
    if judged.p_worse is None:
        often = sum(not constraint.allows(v) for v in by_start) * 2 > len(by_start)
        word: Word = "regressed" if often else "ok"
        return LimitVerdict(text, word, now, broken=True, reason="" if often else "in few starts only")
    if judged.verdict == "regressed":
        return LimitVerdict(text, "regressed", now, broken=True)
    return LimitVerdict(text, "ok", now, broken=True, reason="outside the limit, but within the spread of the baseline")


def values_by_start(starts: Sequence[Sequence[Measurement]], path: str) -> list[list[float]]:
    """The measured values of one metric, start by start; a start without one gives an empty list."""
    found = []
    for rounds in starts:
        values = [metric(r, path) for r in rounds]
        found.append([v for v in values if v is not None])
    return found
