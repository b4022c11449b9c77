"""The profile's constraints and the failed requests, held against what was measured now. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Constraint
from tuner.regress.verdict import Evidence, MetricVerdict, Rules, Word, judge_metric

FAILED = "failed_requests"
ANSWERED_SLACK = 0.03
"""A share of the requested output tokens that is smaller by more than this is less."""


@dataclass(frozen=True)
class LimitVerdict:
    """One constraint now. `broken` with `ok` is outside the limit, but within the spread of what was frozen."""

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
    then: Sequence[Sequence[Measurement]],
    now: Sequence[Sequence[Measurement]],
    rules: Rules,
) -> list[LimitVerdict]:
    """Each constraint on the median over the starts of this run (rounds by start on both sides).

    Noise alone crosses a limit close to what was frozen in every other run. So a broken limit is a regression only
    where the metric is significantly worse than at the freeze, or where the frozen rounds have no spread (no failed
    request then) and more than half of the starts break it.
    """
    return [_judge(c, then, now, rules, max(1, len(constraints))) for c in constraints]


def _judge(
    constraint: Constraint,
    then: Sequence[Sequence[Measurement]],
    now: Sequence[Sequence[Measurement]],
    rules: Rules,
    share: int,
) -> LimitVerdict:
    text, path = str(constraint), constraint.metric
    by_start = [statistics.median(v) for v in values_by_start(now, path) if v]
    if not by_start:
        return LimitVerdict(text, "inconclusive", None, broken=False, reason=f"{path} was not measured")
    level = statistics.median(by_start)
    if constraint.allows(level):
        return LimitVerdict(text, "ok", level, broken=False)
    evidence = Evidence(values_by_start(then, path), values_by_start(now, path))
    judged = judge_metric(path, evidence, Rules(alarm=rules.alarm, tolerance=0.0, prior=rules.prior), share=share)
    if judged.p_worse is None:
        often = sum(not constraint.allows(v) for v in by_start) * 2 > len(by_start)
        word: Word = "regressed" if often else "ok"
        return LimitVerdict(text, word, level, broken=True, reason="" if often else "in few starts only")
    if judged.verdict == "regressed":
        return LimitVerdict(text, "regressed", level, broken=True)
    reason = "outside the limit, but within the spread at the freeze"
    return LimitVerdict(text, "ok", level, broken=True, reason=reason)


def values_by_start(starts: Sequence[Sequence[Measurement]], path: str) -> list[list[float]]:
    """The measured values of one metric, start by start; a start without one gives an empty list."""
    found = []
    for rounds in starts:
        values = [metric(r, path) for r in rounds]
        found.append([v for v in values if v is not None])
    return found


def count_failures(
    metrics: Mapping[str, MetricVerdict],
    then: Sequence[Sequence[Measurement]],
    now: Sequence[Sequence[Measurement]],
    *,
    sides: tuple[str, str],
    other: Word,
) -> dict[str, MetricVerdict]:
    """The verdicts with a row of the failed requests; the side that fails more of them, or answers less, is not better.

    `now` is not `improved` then, but `other`; where `then` fails more, `now` is not `regressed` when `other` is
    `inconclusive`. `sides` names the two in the row.
    """
    (failed_then, of_then), (failed_now, of_now) = _failures(then), _failures(now)
    counts = f"{sides[0]} {failed_then} of {of_then} requests, {sides[1]} {failed_now} of {of_now}"
    by_now, by_then = failed_now * of_then > failed_then * of_now, failed_then * of_now > failed_now * of_then
    answered_then, answered_now = _answered(then), _answered(now)
    if answered_then is not None and answered_now is not None:
        by_now |= answered_now < answered_then - ANSWERED_SLACK
        by_then |= answered_then < answered_now - ANSWERED_SLACK
        counts += f"; answered {answered_then:.0%} and {answered_now:.0%} of what was asked".replace("%", " %")
    judged = {}
    for name, m in metrics.items():
        too_good = m.verdict == "improved" and by_now
        too_bad = m.verdict == "regressed" and by_then and other == "inconclusive"
        held = too_good or too_bad
        reason = f"the faster side fails more requests or answers less: {counts}"
        judged[name] = dataclasses.replace(m, verdict=other, reason=reason) if held else m
    if of_then and of_now and FAILED not in judged:
        rates = failed_then / sum(map(len, then)), failed_now / sum(map(len, now))
        judged[FAILED] = MetricVerdict(FAILED, False, "ok", *rates, reason=counts)
    return judged


def _answered(starts: Sequence[Sequence[Measurement]]) -> float | None:
    """Mean share of the requested output tokens that was given; None where no round says."""
    known = [r.answered_share for start in starts for r in start if r.answered_share is not None]
    return sum(known) / len(known) if known else None


def _failures(starts: Sequence[Sequence[Measurement]]) -> tuple[int, int]:
    rounds = [r for start in starts for r in start]
    return sum(r.failed_requests or 0 for r in rounds), sum(r.requests or 0 for r in rounds)
