"""The verdict: whether tonight's rounds differ from the baseline, and by enough to matter. Pure.

A metric has `regressed` when two gates are open: the difference is statistically significant, and it is
larger than the tolerance. Significance is Student's, on the hierarchical spread of `spread.py`; the
tolerance is the standard deviation of a single start unless one is given, because a change that a mere
restart can bring about is nothing to be woken for.

A night goes in looks. After the planned starts, no suspicion ends it; a suspicion has it look again with
more fresh starts, and only a look of that kind may raise the alarm. What is still suspicious at the end,
yet no alarm, is `inconclusive`; a second night in a row of suspicion is judged together with the first.
The probability of a false alarm is shared by the metrics of the gate, so that it holds for the whole night.
`benchmarks/nightly.py` checks these figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tuner.domain.measurement import higher_is_better
from tuner.regress.spread import (
    Group,
    Prior,
    Spread,
    Starts,
    estimate_spread,
    group_of,
    night_variance,
    t_quantile,
    upper_tail,
)

Word = Literal["ok", "regressed", "improved", "inconclusive", "not comparable"]


@dataclass(frozen=True)
class Rules:
    """What counts as an alarm. Probabilities are of a night on which nothing has changed."""

    alarm: float = 0.0058
    """Of an alarm out of tonight's starts alone, over all metrics of the gate."""
    alarm_with_last_night: float = 0.002
    """Of an alarm that needs last night's starts too, on top."""
    suspicion: float = 0.10
    """A metric this improbable asks for another look."""
    undecided: float = 0.025
    """A metric still this improbable after the last look is inconclusive."""
    tolerance: float | None = None
    """Relative change that is put up with; None: the standard deviation of one start."""
    machine_allowance: float = 0.10
    """Largest change that the stock control may excuse: days differ by some percent; a machine that is slower
    than that delivers less, whatever is to blame."""
    looks: int = 3
    """Looks a night at most; 1: never more than the planned starts."""
    prior: Prior = field(default_factory=Prior)


@dataclass(frozen=True)
class MetricVerdict:
    """One metric tonight against the baseline. Changes are relative, positive is a larger value."""

    metric: str
    gate: bool
    verdict: Word
    baseline: float | None
    now: float | None
    change: float | None = None
    ci95: tuple[float, float] | None = None
    p_worse: float | None = None
    """Probability of something at least this bad when nothing has changed."""
    tolerance: float | None = None
    """Relative, in the bad direction."""
    suspicious: bool = False
    with_last_night: bool = False
    """The alarm rests on last night's starts too."""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The metric's entry in the documents of `regress` and `compare`."""
        return {
            "baseline": self.baseline,
            "now": self.now,
            "change": self.change,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "verdict": self.verdict,
            "gate": self.gate,
            "p_worse": self.p_worse,
            "tolerance": self.tolerance,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Evidence:
    """The values of one metric: rounds by start, for the baseline and for tonight."""

    baseline: Starts
    tonight: Starts
    last_night: Starts = ()
    """The night before, when it was suspicious too and nothing has changed since; else empty."""
    calm_nights: Sequence[Starts] = ()
    """Earlier nights that were ok: they tell the spread, never the level."""


@dataclass(frozen=True)
class NightVerdict:
    """All metrics of one look."""

    verdict: Word
    metrics: dict[str, MetricVerdict]
    look_again: bool
    """Whether more fresh starts are wanted before this verdict is given."""


def starts_by_look(planned: int, look: int) -> int:
    """Fresh starts of tonight that look number `look` (from 1) rests on."""
    return planned + (look - 1) * max(planned, 2)


def judge_night(
    evidence: Mapping[str, Evidence], gate: Sequence[str], rules: Rules, *, look: int, bound: int | None = None
) -> NightVerdict:
    """The verdict over the metrics of the gate after look number `look` (from 1) of at most `bound`.

    Metrics outside the gate are judged alike and decide nothing.
    """
    last = look >= (rules.looks if bound is None else bound)
    may_alarm = look > 1 or last
    share = max(1, len(gate))
    metrics = {
        name: judge_metric(name, e, rules, gate=name in gate, share=share, may_alarm=may_alarm, last=last)
        for name, e in evidence.items()
    }
    gated = [metrics[name] for name in gate if name in metrics]
    word = overall([m.verdict for m in gated])
    look_again = not last and word != "regressed" and any(m.suspicious for m in gated)
    return NightVerdict(word, metrics, look_again)


def judge_metric(
    metric: str,
    evidence: Evidence,
    rules: Rules,
    *,
    gate: bool = True,
    share: int = 1,
    may_alarm: bool = True,
    last: bool = True,
) -> MetricVerdict:
    """One metric; `share` is the number of metrics that the probability of a false alarm is divided by."""
    try:
        baseline, tonight = group_of(evidence.baseline), group_of(evidence.tonight)
        last_night = group_of(evidence.last_night)
        calm = [g for g in map(group_of, evidence.calm_nights) if g is not None]
    except ValueError as error:
        return _unmeasured(metric, gate, str(error))
    if baseline is None or tonight is None:
        side = "the baseline" if baseline is None else "tonight"
        return _unmeasured(metric, gate, f"not measured in {side}")
    groups = [baseline, tonight, *calm] if last_night is None else [baseline, tonight, last_night, *calm]
    spread = estimate_spread(groups, rules.prior)
    spread = dataclasses.replace(spread, night_var=night_variance(calm, spread))
    test = _Test.of(metric, baseline, tonight, spread, rules)
    alarm = may_alarm and test.worse(rules.alarm / share)
    joint = False
    if may_alarm and not alarm and last_night is not None and test.p_worse <= rules.suspicion:
        both = _Test.of(metric, baseline, tonight.joined(last_night), spread, rules, nights=2)
        before = _Test.of(metric, baseline, last_night, spread, rules)
        joint = before.p_worse <= rules.suspicion and both.worse(rules.alarm_with_last_night / share)
    word: Word = "ok"
    reason = ""
    if alarm or joint:
        word = "regressed"
    elif test.better(rules.alarm / share):
        word = "improved"
    elif last and test.p_worse <= rules.undecided and test.size > test.tolerance:
        word = "inconclusive"
        reason = "worse than the tolerance, yet not beyond doubt: another night will tell"
    change = math.expm1(tonight.level - baseline.level)
    return MetricVerdict(
        metric=metric,
        gate=gate,
        verdict=word,
        baseline=math.exp(baseline.level),
        now=math.exp(tonight.level),
        change=change,
        ci95=test.interval(tonight.level - baseline.level),
        p_worse=test.p_worse,
        tolerance=math.expm1(test.tolerance),
        suspicious=test.p_worse <= rules.suspicion,
        with_last_night=joint,
        reason=reason,
    )


def overall(words: Sequence[Word]) -> Word:
    """The whole night's word: the gravest one; `improved` only when nothing is in doubt."""
    order: tuple[Word, ...] = ("not comparable", "regressed", "inconclusive", "improved")
    return next((word for word in order if word in words), "ok")


def explained_by_control(frozen: Evidence, control: Evidence, metric: str, rules: Rules) -> bool:
    """Whether the stock control got worse tonight too, and the frozen configuration against it did not.

    The change has to be within the allowance for the machine. The control has to have moved beyond doubt of
    its own: a laxer bar clears more real regressions than false alarms. And what is left of the frozen
    configuration's change after taking the control's off must be no longer significant, or within the tolerance.
    """
    groups = [group_of(s) for s in (frozen.baseline, frozen.tonight, control.baseline, control.tonight)]
    frozen_then, frozen_now, control_then, control_now = groups
    if frozen_then is None or frozen_now is None or control_then is None or control_now is None:
        return False
    spread = estimate_spread([frozen_then, frozen_now, control_then, control_now], rules.prior)
    control_test = _Test.of(metric, control_then, control_now, spread, rules)
    if control_test.p_worse > rules.undecided:
        return False
    sign = -1.0 if higher_is_better(metric) else 1.0
    if sign * (frozen_now.level - frozen_then.level) > math.log1p(rules.machine_allowance):
        return False
    left = sign * ((frozen_now.level - frozen_then.level) - (control_now.level - control_then.level))
    sd = math.hypot(spread.difference_sd(frozen_then, frozen_now), spread.difference_sd(control_then, control_now))
    return upper_tail(left / sd, spread.dof) > rules.undecided or left <= control_test.tolerance


@dataclass(frozen=True)
class _Test:
    """One comparison of levels; sizes are logarithms, positive is worse."""

    size: float
    sd: float
    dof: float
    tolerance: float
    p_worse: float

    @classmethod
    def of(cls, metric: str, then: Group, now: Group, spread: Spread, rules: Rules, nights: int = 1) -> _Test:
        sign = -1.0 if higher_is_better(metric) else 1.0
        size = sign * (now.level - then.level)
        sd = spread.difference_sd(then, now, nights)
        tolerance = spread.mean_sd if rules.tolerance is None else math.log1p(rules.tolerance)
        return cls(size, sd, spread.dof, tolerance, upper_tail(size / sd, spread.dof))

    def worse(self, probability: float) -> bool:
        """Both gates, in the bad direction."""
        return self.p_worse <= probability and self.size > self.tolerance

    def better(self, probability: float) -> bool:
        """Both gates, in the good direction."""
        return upper_tail(-self.size / self.sd, self.dof) <= probability and -self.size > self.tolerance

    def interval(self, difference: float) -> tuple[float, float]:
        """The 95 % interval of the relative change whose logarithm is `difference`."""
        half = t_quantile(0.975, self.dof) * self.sd
        return math.expm1(difference - half), math.expm1(difference + half)


def _unmeasured(metric: str, gate: bool, reason: str) -> MetricVerdict:
    return MetricVerdict(metric, gate, "inconclusive", None, None, reason=reason)
