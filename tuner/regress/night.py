"""One night: looks at fresh starts until the verdict is clear, and what goes with the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Measurement, metric
from tuner.domain.experiment import Fingerprint
from tuner.domain.units import counted
from tuner.freeze.baseline import rounds_by_start
from tuner.freeze.fingerprint import Difference, differences
from tuner.regress.history import Night, NightMetric, RollingView, baseline_id, evidence_of, rolling_view
from tuner.regress.limits import LimitVerdict, judge_limits, values_by_start
from tuner.regress.plan import thin_baseline
from tuner.regress.starts import Arm, Starter, StartResult
from tuner.regress.suspects import name_suspects
from tuner.regress.verdict import (
    Evidence,
    MetricVerdict,
    NightVerdict,
    Rules,
    Word,
    explained_by_control,
    judge_metric,
    judge_night,
    overall,
    starts_by_look,
)
from tuner.regress.words import describe_limit
from tuner.trial.progress import Progress

ControlMode = Literal["auto", "always", "never"]
SHOWN = (
    "ttft_ms.p50",
    "ttft_ms.p90",
    "ttft_ms.p99",
    "cold_ttft_ms.p90",
    "itl_ms.p99",
    "e2e_ms.p90",
    "request_throughput",
    "output_token_throughput",
    "prefix_hit_rate",
    "kv_cache_usage_peak",
)
"""Metrics judged and shown beside those of the gate, with the TTFT of each class."""


def shown_beside(rounds: Iterable[Measurement]) -> list[str]:
    """SHOWN, and P50 and P90 of each class that the rounds tell apart."""
    groups = sorted({name for r in rounds for name in r.groups})
    return [*SHOWN, *(f"groups.{name}.{stat}" for name in groups for stat in ("p50", "p90"))]


@dataclass(frozen=True)
class NightPlan:
    """What tonight may do."""

    planned: int
    """Fresh starts before the first look."""
    rules: Rules
    control: ControlMode = "auto"
    """auto: the stock control runs beside the extra starts that a suspicion asks for."""
    nights: Sequence[Night] = ()
    """The history of this baseline, oldest first."""
    rebase: bool = False
    """Tonight is going to be the baseline. The stock control runs beside every start unless it is never to run: later
    nights tell the machine from the configuration by it, for which both have to be of the same day."""

    def stock_runs(self, frozen: Frozen, look: int) -> bool:
        """Whether the starts that look number `look` (from 1) adds are paired with starts of the stock control."""
        if frozen.control is None or self.control == "never":
            return False
        return self.rebase or self.control == "always" or look > 1

    def starts_for(self, frozen: Frozen, look: int) -> int:
        """Engine starts, the stock control's among them, that look number `look` (from 1) adds."""
        ours = starts_by_look(self.planned, look) - (starts_by_look(self.planned, look - 1) if look > 1 else 0)
        return ours * (1 + self.stock_runs(frozen, look))


@dataclass(frozen=True)
class NightResult:
    """Everything that is known in the morning."""

    frozen: Frozen
    fingerprint: Fingerprint
    verdict: Word
    metrics: dict[str, MetricVerdict]
    limits: list[LimitVerdict]
    control: dict[str, MetricVerdict]
    """The stock control against its own baseline; empty when it did not run."""
    changes: list[Difference]
    suspects: list[str]
    rolling: list[RollingView]
    notes: list[str]
    rounds: list[list[Measurement]]
    control_rounds: list[list[Measurement]]

    @property
    def starts(self) -> int:
        """Fresh starts of the frozen configuration tonight."""
        return len(self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "verdict": self.verdict,
            "simulated": self.frozen.simulated,
            "metrics": {name: m.to_json() for name, m in self.metrics.items()},
            "suspects": self.suspects,
            "constraints": [vars(limit) for limit in self.limits],
            "control": {name: m.to_json() for name, m in self.control.items()},
            "starts": {"baseline": self.frozen.baseline.starts, "tonight": self.starts},
            "changes": [str(c) for c in self.changes],
            "rolling": [
                {"metric": v.metric, "median": v.median, "drift": v.drift, "nights": v.nights, "left_out": v.left_out}
                for v in self.rolling
            ],
            "notes": self.notes,
        }

    def history_line(self, at: str) -> Night:
        """What the history keeps of tonight."""
        return Night(
            at=at,
            baseline_id=baseline_id(self.frozen),
            verdict=self.verdict,
            fingerprint=self.fingerprint,
            simulated=self.frozen.simulated,
            starts=self.starts,
            metrics={name: NightMetric.of(m) for name, m in self.metrics.items()},
            values={name: values_by_start(self.rounds, name) for name in self.metrics},
            control_values={name: values_by_start(self.control_rounds, name) for name in self.control},
            suspects=self.suspects,
        )


@dataclass
class _Tonight:
    frozen: list[StartResult] = field(default_factory=list)
    stock: list[StartResult] = field(default_factory=list)

    @property
    def started(self) -> int:
        return len(self.frozen) + len(self.stock)


async def watch(
    frozen: Frozen, fingerprint: Fingerprint, plan: NightPlan, starter: Starter, progress: Progress
) -> NightResult:
    """Start, measure and judge; more fresh starts while the verdict asks for them, up to the bound.

    `progress` hears how many starts are planned, and of more with the reason. EngineError and LoadError pass
    through: a broken night has no verdict.
    """
    baseline = rounds_by_start(frozen.baseline)
    ours = Arm("frozen", frozen.engine_args, frozen.reuse_budget)
    stock = None if frozen.control is None else Arm("stock", frozen.control.engine_args)
    tonight = _Tonight()
    planned = plan.starts_for(frozen, 1)
    progress.study_started(planned, kind="rebase" if plan.rebase else "night", unit="start")
    for look in range(1, plan.rules.looks + 1):
        with_control = stock if plan.stock_runs(frozen, look) else None
        await _start_more(tonight, starts_by_look(plan.planned, look), ours, with_control, starter)
        rounds = [s.rounds for s in tonight.frozen]
        verdict = judge_night(
            {
                name: evidence_of(
                    name, values_by_start(baseline, name), values_by_start(rounds, name), plan.nights, fingerprint
                )
                for name in _judged(frozen, baseline)
            },
            frozen.regress_metrics,
            plan.rules,
            look=look,
        )
        if not verdict.look_again:
            break
        more = plan.starts_for(frozen, look + 1)
        half = f", {more // 2} of them of the stock configuration" if plan.stock_runs(frozen, look + 1) else ""
        planned += more
        progress.replanned(planned, f"{suspicion(verdict)}: {counted(more, 'more start')}{half}")
    return _result(frozen, fingerprint, plan, tonight, verdict)


def suspicion(verdict: NightVerdict) -> str:
    """Why another look is taken: "a suspicion (ttft_ms.p90)"."""
    return f"a suspicion ({', '.join(name for name, m in verdict.metrics.items() if m.gate and m.suspicious)})"


async def _start_more(tonight: _Tonight, wanted: int, ours: Arm, stock: Arm | None, starter: Starter) -> None:
    """Up to `wanted` starts of ours; the control's between them, the order turning (ours stock, stock ours)."""
    while len(tonight.frozen) < wanted:
        pair = [ours] if stock is None else [ours, stock]
        if len(tonight.frozen) % 2:
            pair.reverse()
        for arm in pair:
            result = await starter.start(arm, tonight.started + 1)
            (tonight.frozen if arm is ours else tonight.stock).append(result)


def _judged(frozen: Frozen, baseline: Sequence[Sequence[Measurement]]) -> list[str]:
    """The gate, and whatever of the shown metrics the baseline has a usable value of."""
    shown = [
        name
        for name in shown_beside(r for rounds in baseline for r in rounds)
        if name not in frozen.regress_metrics
        and all((metric(r, name) or 0.0) > 0 for rounds in baseline for r in rounds)
    ]
    return [*frozen.regress_metrics, *shown]


def _result(
    frozen: Frozen, fingerprint: Fingerprint, plan: NightPlan, tonight: _Tonight, verdict: NightVerdict
) -> NightResult:
    rounds = [s.rounds for s in tonight.frozen]
    control_rounds = [s.rounds for s in tonight.stock]
    known = _completed(fingerprint, tonight.frozen)
    changes = differences(frozen.fingerprint, known)
    baseline = rounds_by_start(frozen.baseline)
    limits = judge_limits(frozen.constraints, baseline, rounds, plan.rules)
    control = _control(frozen, control_rounds, plan.rules)
    metrics, notes = verdict.metrics, list[str]()
    software = [c for c in changes if c.comparable]
    if frozen.control is not None and control_rounds and not software:
        metrics, notes = _less_the_machine(frozen, metrics, rounds, control_rounds, plan.rules)
    gate = [metrics[name].verdict for name in frozen.regress_metrics]
    word = overall([*gate, *(limit.verdict for limit in limits if limit.verdict == "regressed")])
    notes += [f"{b.constraint}: {describe_limit(b)}, {b.reason}" for b in limits if b.reason and b.now is not None]
    notes += [note for start in [*tonight.frozen, *tonight.stock] for note in start.notes]
    thin = "" if plan.rebase else thin_baseline(frozen.baseline.starts, control=frozen.control is not None)
    notes += [thin] if thin else []
    result = NightResult(
        frozen=frozen,
        fingerprint=known,
        verdict=word,
        metrics=metrics,
        limits=limits,
        control=control,
        changes=changes,
        suspects=name_suspects(word, changes, known, plan.nights, control),
        rolling=[],
        notes=notes,
        rounds=rounds,
        control_rounds=control_rounds,
    )
    nights = [*plan.nights, result.history_line("")]
    rolling = [
        rolling_view(name, m.baseline, nights)
        for name in frozen.regress_metrics
        if (m := metrics[name]).baseline is not None
    ]
    return dataclasses.replace(result, rolling=rolling)


def _completed(fingerprint: Fingerprint, starts: Sequence[StartResult]) -> Fingerprint:
    revision = next((s.model_revision for s in starts if s.model_revision), None)
    version = next((s.vllm_version for s in starts if s.vllm_version), None)
    return fingerprint.model_copy(
        update={
            "model_revision": revision or fingerprint.model_revision,
            "vllm_version": fingerprint.vllm_version or version,
        }
    )


def _control(frozen: Frozen, control_rounds: Sequence[Sequence[Measurement]], rules: Rules) -> dict[str, MetricVerdict]:
    if frozen.control is None or not control_rounds:
        return {}
    then = rounds_by_start(frozen.control.baseline)
    return {
        name: judge_metric(
            name, Evidence(values_by_start(then, name), values_by_start(control_rounds, name)), rules, gate=False
        )
        for name in frozen.regress_metrics
    }


def _less_the_machine(
    frozen: Frozen,
    metrics: dict[str, MetricVerdict],
    rounds: Sequence[Sequence[Measurement]],
    control_rounds: Sequence[Sequence[Measurement]],
    rules: Rules,
) -> tuple[dict[str, MetricVerdict], list[str]]:
    """With nothing changed but the machine: what the stock control shows too is not the configuration's."""
    if frozen.control is None:
        return metrics, []
    then, stock_then = rounds_by_start(frozen.baseline), rounds_by_start(frozen.control.baseline)
    cleared, notes = dict(metrics), []
    for name in frozen.regress_metrics:
        judged = metrics[name]
        if judged.verdict not in ("regressed", "inconclusive") or judged.change is None:
            continue
        ours = Evidence(values_by_start(then, name), values_by_start(rounds, name))
        stock = Evidence(values_by_start(stock_then, name), values_by_start(control_rounds, name))
        if explained_by_control(ours, stock, name, rules):
            reason = f"{name}: the machine is to blame, the stock configuration changed alike tonight"
            cleared[name] = MetricVerdict(**(vars(judged) | {"verdict": "ok", "reason": reason}))
            notes.append(reason)
    return cleared, notes


def incomparable(frozen: Frozen, fingerprint: Fingerprint, changes: Sequence[Difference]) -> NightResult:
    """The result of a night that was not started, because it could prove nothing."""
    return NightResult(
        frozen, fingerprint, "not comparable", {}, [], {}, list(changes), [], [], [str(c) for c in changes], [], []
    )
