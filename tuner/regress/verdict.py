"""The verdict: whether what was measured now differs from then, and by enough to matter. Pure.

A metric has `regressed` when two conditions hold: the difference is statistically significant, and it is larger
than the tolerance. Significance is Student's, on the hierarchical spread of `spread.py`. The tolerance is the
standard deviation of a single start unless one is given, because a change that a restart alone can bring about
is no reason for an alarm.

A run goes in stages. After the planned starts, it ends if nothing is suspicious; a suspicion adds another stage of
fresh starts, and only such a stage may raise the alarm. What is still suspicious after the last stage, yet no
alarm, is `inconclusive`; a second run in a row with a suspicion is judged together with the first. The probability
of a false alarm is shared by the metrics of the gate, so that it holds for the whole run. `benchmarks/nightly.py`
checks these figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy import special

from tuner.domain.experiment import Contrast
from tuner.domain.measurement import higher_is_better
from tuner.measure.contrast import SETTING_START_SD, Noise, over_starts, round_noise
from tuner.regress.spread import (
    Group,
    Prior,
    Spread,
    Starts,
    estimate_spread,
    group_of,
    run_variance,
    t_quantile,
    upper_tail,
)

PAIR_SD, PAIR_DF = 0.05, 4.0
"""Prior of the ratio of two rounds of one cycle, with its weight in degrees of freedom."""

Word = Literal["ok", "regressed", "improved", "inconclusive", "not comparable"]


@dataclass(frozen=True)
class Rules:
    """What counts as an alarm. Probabilities are of a run in which nothing has changed."""

    alarm: float = 0.0058
    """Of an alarm from this run's starts alone, over all metrics of the gate."""
    alarm_with_last_run: float = 0.002
    """Of an alarm that needs the last run's starts too, on top."""
    suspicion: float = 0.10
    """A metric this improbable asks for another stage."""
    undecided: float = 0.025
    """A metric still this improbable after the last stage is inconclusive."""
    tolerance: float | None = None
    """Relative change that is accepted; None: the standard deviation of one start."""
    machine_allowance: float = 0.10
    """Largest change that the stock setting may excuse: days differ by some percent; a machine that is slower
    than that has a fault worth an alarm."""
    stages: int = 3
    """Stages of a run at most; 1: never more than the planned starts."""
    prior: Prior = field(default_factory=Prior)
    both_ways: bool = False
    """B may be better as well as worse than A: both take another stage."""
    pair_start_sd: float = SETTING_START_SD
    """Prior of what a start adds to the ratio of two settings measured in it; 0: there is one start, and each cycle is
    an independent piece."""


@dataclass(frozen=True)
class MetricVerdict:
    """One metric now against then. Changes are relative, positive is a larger value."""

    metric: str
    gate: bool
    verdict: Word
    baseline: float | None
    """At the freeze, or of A in a comparison."""
    now: float | None
    change: float | None = None
    ci95: tuple[float, float] | None = None
    vs_stock: Contrast | None = None
    """The frozen setting against stock, both measured in this run; None where stock did not run."""
    p_worse: float | None = None
    """Probability of something at least this bad when nothing has changed."""
    tolerance: float | None = None
    """Relative, in the bad direction."""
    suspicious: bool = False
    with_last_run: bool = False
    """The alarm rests on the last run's starts too."""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The metric's entry in the documents of `regress` and `compare`."""
        left_out = ("metric", "suspicious", "with_last_run")
        row = {name: value for name, value in vars(self).items() if name not in left_out}
        vs_stock = None if self.vs_stock is None else self.vs_stock.to_json()
        return {**row, "vs_stock": vs_stock, "reason": self.reason or None}


@dataclass(frozen=True)
class Evidence:
    """The values of one metric: rounds by start, of then and of now."""

    then: Starts
    now: Starts
    last_run: Starts = ()
    """The run before, when it was suspicious too and nothing has changed since; else empty."""
    earlier: Sequence[Starts] = ()
    """Earlier runs that were ok: they tell the spread, never the level."""
    paired: bool = False
    """Both sides were measured in the same starts and cycles: `now[i][j]` belongs to `then[i][j]`."""


@dataclass(frozen=True)
class Judgement:
    """All metrics after one stage."""

    verdict: Word
    metrics: dict[str, MetricVerdict]
    more_wanted: bool
    """Whether another stage is wanted before this verdict is given."""

    @property
    def suspicion(self) -> str:
        """Why another stage is wanted: `a suspicion (ttft_ms.p90)`."""
        return f"a suspicion ({', '.join(n for n, m in self.metrics.items() if m.gate and m.suspicious)})"


def starts_by_stage(planned: int, stage: int) -> int:
    """Starts (or cycles on a server) of one side that the verdict after stage number `stage` (from 1) rests on."""
    return planned + (stage - 1) * max(planned, 2) if stage > 0 else 0


def judge(evidence: Mapping[str, Evidence], gate: Sequence[str], rules: Rules, *, stage: int) -> Judgement:
    """The verdict over the metrics of the gate after stage number `stage` (from 1).

    Metrics outside the gate are judged alike and decide nothing.
    """
    last = stage >= rules.stages
    may_alarm = stage > 1 or last
    share = max(1, len(gate))
    metrics = {
        name: judge_metric(name, e, rules, gate=name in gate, share=share, may_alarm=may_alarm, last=last)
        for name, e in evidence.items()
    }
    gated = [metrics[name] for name in gate if name in metrics]
    word = overall([m.verdict for m in gated])
    sure = word == "regressed" or (rules.both_ways and word == "improved")
    more_wanted = not last and not sure and any(m.suspicious for m in gated)
    return Judgement(word, metrics, more_wanted)


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
        then, now, last_run = group_of(evidence.then), group_of(evidence.now), group_of(evidence.last_run)
        earlier = [g for g in map(group_of, evidence.earlier) if g is not None]
    except ValueError as error:
        return MetricVerdict(metric, gate, "inconclusive", None, None, reason=str(error))
    if then is None or now is None:
        side = "at the freeze" if then is None and not evidence.paired else "on both sides" if then is None else "now"
        return MetricVerdict(metric, gate, "inconclusive", None, None, reason=f"not measured {side}")
    groups = [then, now, *earlier] if last_run is None else [then, now, last_run, *earlier]
    spread = estimate_spread(groups, rules.prior)
    spread = dataclasses.replace(spread, run_var=run_variance(earlier, spread))
    test = _Test.paired(metric, evidence, rules) if evidence.paired else _Test.of(metric, then, now, spread, rules)
    alarm = may_alarm and test.worse(rules.alarm / share)
    joint = False
    if may_alarm and not alarm and last_run is not None and test.p_worse <= rules.suspicion:
        both = _Test.of(metric, then, now.joined(last_run), spread, rules, runs=2)
        before = _Test.of(metric, then, last_run, spread, rules)
        joint = before.p_worse <= rules.suspicion and both.worse(rules.alarm_with_last_run / share)
    word: Word = "ok"
    reason = ""
    if alarm or joint:
        word = "regressed"
    elif (may_alarm or not rules.both_ways) and test.better(rules.alarm / share):
        word = "improved"
    elif last and test.p_worse <= rules.undecided and test.size > test.tolerance:
        word = "inconclusive"
        reason = "worse by more than the tolerance, but not significantly: measure again"
    contrast = test.contrast()
    return MetricVerdict(
        metric=metric,
        gate=gate,
        verdict=word,
        baseline=math.exp(then.level),
        now=math.exp(now.level),
        change=contrast.change,
        ci95=contrast.ci95,
        p_worse=test.p_worse,
        tolerance=math.expm1(test.tolerance),
        suspicious=(min(test.p_worse, 1 - test.p_worse) if rules.both_ways else test.p_worse) <= rules.suspicion,
        with_last_run=joint,
        reason=reason,
    )


def overall(words: Sequence[Word]) -> Word:
    """The word of the whole run: the gravest one; `improved` only when nothing is in doubt."""
    order: tuple[Word, ...] = ("not comparable", "regressed", "inconclusive", "improved")
    return next((word for word in order if word in words), "ok")


def explained_by_stock(frozen: Evidence, stock: Evidence, metric: str, rules: Rules) -> bool:
    """Whether stock got worse as well, and the frozen setting against it did not.

    The change has to be within the allowance for the machine. Stock has to have changed significantly by itself:
    a laxer condition clears more real regressions than false alarms. And what is left of the frozen setting's
    change after taking stock's off must be no longer significant, or within the tolerance.
    """
    try:
        groups = [group_of(s) for s in (frozen.then, frozen.now, stock.then, stock.now)]
    except ValueError:
        return False
    frozen_then, frozen_now, stock_then, stock_now = groups
    if frozen_then is None or frozen_now is None or stock_then is None or stock_now is None:
        return False
    spread = estimate_spread([frozen_then, frozen_now, stock_then, stock_now], rules.prior)
    stock_test = _Test.of(metric, stock_then, stock_now, spread, rules)
    if stock_test.p_worse > rules.undecided:
        return False
    frozen_test = _Test.of(metric, frozen_then, frozen_now, spread, rules)
    if frozen_test.size > math.log1p(rules.machine_allowance):
        return False
    left = frozen_test.size - stock_test.size
    p_left = upper_tail(left / math.hypot(frozen_test.sd, stock_test.sd), spread.dof)
    return p_left > rules.undecided or left <= stock_test.tolerance


@dataclass(frozen=True)
class _Test:
    """One comparison of levels; sizes are logarithms, positive is worse."""

    sign: float
    size: float
    sd: float
    dof: float
    tolerance: float

    @classmethod
    def of(cls, metric: str, then: Group, now: Group, spread: Spread, rules: Rules, runs: int = 1) -> _Test:
        sd = spread.difference_sd(then, now, runs)
        return cls._made(metric, now.level - then.level, sd, spread.dof, spread.mean_sd, rules)

    @classmethod
    def paired(cls, metric: str, evidence: Evidence, rules: Rules) -> _Test:
        """From the ratios within cycles: what a start or a cycle has in common cancels."""
        sides = zip(evidence.then, evidence.now, strict=True)
        ratios = [np.log(np.asarray(now) / np.asarray(then)) for then, now in sides if then]
        rounds = _pair_noise(round_noise(ratios))
        estimate = over_starts(ratios, rules.pair_start_sd, rounds=rounds)
        assert estimate is not None, "both sides have values"
        units = len(ratios) if rules.pair_start_sd else sum(r.size for r in ratios)
        return cls._made(metric, estimate.value, estimate.se, estimate.df, estimate.se * math.sqrt(units), rules)

    @classmethod
    def _made(cls, metric: str, difference: float, sd: float, dof: float, unit_sd: float, rules: Rules) -> _Test:
        sign = -1.0 if higher_is_better(metric) else 1.0
        return cls(
            sign, sign * difference, sd, dof, unit_sd if rules.tolerance is None else math.log1p(rules.tolerance)
        )

    @property
    def p_worse(self) -> float:
        """Probability of something at least this bad when nothing has changed."""
        return upper_tail(self.size / self.sd, self.dof)

    def worse(self, probability: float) -> bool:
        """Significant and beyond the tolerance, in the bad direction."""
        return self.p_worse <= probability and self.size > self.tolerance

    def better(self, probability: float) -> bool:
        """Significant and beyond the tolerance, in the good direction."""
        return upper_tail(-self.size / self.sd, self.dof) <= probability and -self.size > self.tolerance

    def contrast(self) -> Contrast:
        """The relative change with its 95 % interval."""
        difference, half = self.sign * self.size, t_quantile(0.975, self.dof) * self.sd
        return Contrast(
            change=math.expm1(difference), ci95=(math.expm1(difference - half), math.expm1(difference + half))
        )


def _pair_noise(seen: Noise | None) -> Noise:
    """The noise of ratios within cycles with its prior, which is dropped where the noise is clearly larger."""
    if seen is None:
        return Noise(PAIR_SD**2, PAIR_DF)
    if seen.df > 1 and special.fdtrc(seen.df, PAIR_DF, seen.variance / PAIR_SD**2) < 0.1:
        return seen
    df = PAIR_DF + seen.df
    return Noise((PAIR_DF * PAIR_SD**2 + seen.df * seen.variance) / df, df)
