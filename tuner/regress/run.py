"""One run of a frozen configuration: what it measures, how it is judged, and what goes with the verdict. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tuner.domain.experiment import STOCK_ID, Contrast, Fingerprint, Results
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Measurement, metric
from tuner.domain.setting import CHUNK_KNOB, STOCK, Setting
from tuner.experiment.design import Named, StartPlan
from tuner.freeze.fingerprint import Difference, differences
from tuner.freeze.measured import rounds_by_start
from tuner.regress.design import Side, Staged, rounds_of, turn
from tuner.regress.history import HistoryMetric, HistoryRow, RollingView, evidence_of, frozen_id, rolling_view
from tuner.regress.limits import LimitVerdict, count_failures, judge_limits, values_by_start
from tuner.regress.plan import few_starts_advice
from tuner.regress.suspects import name_suspects
from tuner.regress.verdict import (
    Evidence,
    Judgement,
    MetricVerdict,
    Rules,
    Word,
    explained_by_stock,
    judge,
    judge_metric,
    overall,
    starts_by_stage,
)
from tuner.regress.words import describe_limit

FROZEN_ID = "frozen"
StockMode = Literal["auto", "always", "never"]
Rounds = Sequence[Sequence[Measurement]]
"""Rounds by start."""
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


def rounds_at_freeze(frozen: Frozen) -> int:
    """Rounds of a start, as there were at the freeze at most."""
    return max(map(len, rounds_by_start(frozen.measured)))


def is_stock(frozen: Frozen) -> bool:
    """Whether the frozen configuration is stock itself."""
    return frozen.stock is not None and frozen.stock.engine_args == frozen.engine_args and frozen.reuse_budget is None


def shown_beside(rounds: Iterable[Measurement]) -> list[str]:
    """SHOWN, and P50 and P90 of each class that the rounds tell apart."""
    groups = sorted({name for r in rounds for name in r.groups})
    return [*SHOWN, *(f"groups.{name}.{stat}" for name in groups for stat in ("p50", "p90"))]


@dataclass(frozen=True)
class RunPlan:
    """What is measured, and against what it is judged."""

    frozen: Frozen
    fingerprint: Fingerprint
    """As far as it is known before the first start."""
    planned: int
    """Starts of the first stage."""
    rounds: int
    """Of each start."""
    rules: Rules = field(default_factory=Rules)
    stock_mode: StockMode = "auto"
    """auto: stock is measured beside the further starts that a suspicion asks for."""
    history: Sequence[HistoryRow] = ()
    """Earlier runs of this frozen file, oldest first."""
    rebase: bool = False
    """The run becomes what later runs are judged against. Stock is measured beside every start unless it is never to
    be: later runs tell the machine from the configuration by it, for which both have to be of the same day."""

    @cached_property
    def then(self) -> list[list[Measurement]]:
        """The rounds at the freeze, by start."""
        return rounds_by_start(self.frozen.measured)

    @cached_property
    def judged_metrics(self) -> list[str]:
        """The gate, and whatever of the shown metrics has usable values at the freeze."""
        rounds = [r for start in self.then for r in start]
        shown = [n for n in shown_beside(rounds) if all((metric(r, n) or 0.0) > 0 for r in rounds)]
        return list(dict.fromkeys([*self.frozen.regress_metrics, *shown]))

    def stock_runs(self, stage: int) -> bool:
        """Whether stock is measured beside the starts that stage number `stage` (from 1) adds."""
        if self.frozen.stock is None or is_stock(self.frozen) or self.stock_mode == "never":
            return False
        return self.rebase or self.stock_mode == "always" or stage > 1

    def sides(self, stage: int) -> tuple[Side, ...]:
        """The frozen command, and stock where this stage measures it."""
        frozen, stock = self.frozen, self.frozen.stock
        beside = {} if stock is None else stock.engine_args
        named = [n for n, v in frozen.engine_args.items() if n == CHUNK_KNOB or (stock and beside.get(n) != v)]
        knobs = {n: frozen.engine_args[n] for n in named}
        setting = Setting(knobs=knobs, reuse_budget=frozen.reuse_budget)
        ours = Side(Named(FROZEN_ID, setting), frozen.engine_args, frozen.reuse_budget)
        if stock is None or not self.stock_runs(stage):
            return (ours,)
        return ours, Side(Named(STOCK_ID, STOCK), stock.engine_args)

    def starts(self, stage: int) -> list[StartPlan]:
        """Every start up to the end of this stage; stock's and the frozen setting's in turn."""
        order: list[Side] = []
        for each in range(1, stage + 1):
            for pair in range(starts_by_stage(self.planned, each - 1), starts_by_stage(self.planned, each)):
                order += turn(self.sides(each), pair)
        return [side.start("regress") for side in order]

    def design(self) -> Staged:
        """Which start and which round come next."""
        return Staged(self.starts, lambda _: self.rounds, self.judge)

    def judge(self, results: Results, stage: int) -> Judgement:
        """The verdict on the frozen setting's own rounds, before stock is looked at."""
        rounds = rounds_of(results, FROZEN_ID)
        evidence = {
            name: evidence_of(
                name,
                values_by_start(self.then, name),
                values_by_start(rounds, name),
                self.history,
                self.fingerprint,
            )
            for name in self.judged_metrics
        }
        return judge(evidence, self.frozen.regress_metrics, self.rules, stage=stage)

    def result(self, results: Results) -> RunResult:
        """Everything that is known once the design is done."""
        design = self.design()
        counted = design.measured(results)
        rounds, stock_rounds = rounds_of(counted, FROZEN_ID), rounds_of(counted, STOCK_ID)
        fingerprint = _completed(self.fingerprint, results)
        changes = differences(self.frozen.fingerprint, fingerprint)
        limits = judge_limits(self.frozen.constraints, self.then, rounds, self.rules)
        metrics = design.judged(results).metrics
        stock, notes = self._stock(stock_rounds), list[str]()
        if stock and not any(c.comparable for c in changes):
            metrics, notes = self._without_the_machine(metrics, rounds, stock_rounds)
        metrics = {name: self._with_contrast(m, rounds, stock_rounds) for name, m in metrics.items()}
        metrics = count_failures(metrics, self.then, rounds, sides=("at the freeze", "now"), other="ok")
        gate = [metrics[name].verdict for name in self.frozen.regress_metrics]
        word = overall([*gate, *(limit.verdict for limit in limits if limit.verdict == "regressed")])
        notes += [f"{b.constraint}: {describe_limit(b)}, {b.reason}" for b in limits if b.reason and b.now is not None]
        has_stock = self.frozen.stock is not None and not is_stock(self.frozen)
        advice = "" if self.rebase else few_starts_advice(self.frozen.measured.starts, stock=has_stock)
        notes += [advice] if advice else []
        result = RunResult(
            frozen=self.frozen,
            fingerprint=fingerprint,
            verdict=word,
            metrics=metrics,
            limits=limits,
            stock=stock,
            changes=changes,
            suspects=name_suspects(word, changes, fingerprint, self.history, stock),
            notes=notes,
            rounds=rounds,
            stock_rounds=stock_rounds,
        )
        history = [*self.history, result.history_row("")]
        gated = [metrics[name] for name in self.frozen.regress_metrics]
        rolling = [rolling_view(m.metric, m.baseline, history) for m in gated if m.baseline is not None]
        return dataclasses.replace(result, rolling=rolling)

    def not_comparable(self, changes: Sequence[Difference]) -> RunResult:
        """The result of a run that is not made, because it could prove nothing."""
        return RunResult(
            self.frozen, self.fingerprint, "not comparable", changes=list(changes), notes=[str(c) for c in changes]
        )

    def _stock(self, rounds: Rounds) -> dict[str, MetricVerdict]:
        """Stock now against stock at the freeze."""
        if self.frozen.stock is None or not rounds:
            return {}
        then = rounds_by_start(self.frozen.stock)
        return {
            name: judge_metric(
                name, Evidence(values_by_start(then, name), values_by_start(rounds, name)), self.rules, gate=False
            )
            for name in self.frozen.regress_metrics
        }

    def _without_the_machine(
        self, metrics: dict[str, MetricVerdict], rounds: Rounds, stock_rounds: Rounds
    ) -> tuple[dict[str, MetricVerdict], list[str]]:
        """With no software changed: a change that stock shows as well is the machine's."""
        assert self.frozen.stock is not None, "stock was measured"
        stock_then = rounds_by_start(self.frozen.stock)
        cleared, notes = dict(metrics), []
        for name in self.frozen.regress_metrics:
            judged = metrics[name]
            if judged.verdict not in ("regressed", "inconclusive") or judged.change is None:
                continue
            ours = Evidence(values_by_start(self.then, name), values_by_start(rounds, name))
            stock = Evidence(values_by_start(stock_then, name), values_by_start(stock_rounds, name))
            if explained_by_stock(ours, stock, name, self.rules):
                reason = (
                    f"{name}: the stock setting changed by the same amount, so the machine changed, "
                    "not the configuration"
                )
                cleared[name] = dataclasses.replace(judged, verdict="ok", reason=reason)
                notes.append(reason)
        return cleared, notes

    def _with_contrast(self, m: MetricVerdict, rounds: Rounds, stock_rounds: Rounds) -> MetricVerdict:
        """With the frozen setting against stock, both of this run."""
        evidence = Evidence(values_by_start(stock_rounds, m.metric), values_by_start(rounds, m.metric))
        against = judge_metric(m.metric, evidence, self.rules)
        if against.change is None:
            return m
        return dataclasses.replace(m, vs_stock=Contrast(change=against.change, ci95=against.ci95))


@dataclass(frozen=True)
class RunResult:
    """Everything that is known after a run."""

    frozen: Frozen
    fingerprint: Fingerprint
    verdict: Word
    metrics: dict[str, MetricVerdict] = field(default_factory=dict)
    limits: list[LimitVerdict] = field(default_factory=list)
    stock: dict[str, MetricVerdict] = field(default_factory=dict)
    """The stock setting against itself at the freeze; empty when it was not measured."""
    changes: list[Difference] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    rolling: list[RollingView] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rounds: list[list[Measurement]] = field(default_factory=list)
    stock_rounds: list[list[Measurement]] = field(default_factory=list)

    @property
    def starts(self) -> int:
        """Fresh starts of the frozen configuration in this run."""
        return len(self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "verdict": self.verdict,
            "simulated": self.frozen.simulated,
            "metrics": {name: m.to_json() for name, m in self.metrics.items()},
            "change_point": None,
            "suspects": self.suspects,
            "constraints": [vars(limit) for limit in self.limits],
            "stock": {name: m.to_json() for name, m in self.stock.items()},
            "starts": {"frozen": self.frozen.measured.starts, "now": self.starts},
            "changes": [str(c) for c in self.changes],
            "rolling": [
                {"metric": v.metric, "median": v.median, "drift": v.drift, "runs": v.runs, "left_out": v.left_out}
                for v in self.rolling
            ],
            "notes": self.notes,
        }

    def history_row(self, time: str) -> HistoryRow:
        """What the history keeps of this run."""
        return HistoryRow(
            time=time,
            frozen_id=frozen_id(self.frozen),
            verdict=self.verdict,
            fingerprint=self.fingerprint,
            simulated=self.frozen.simulated,
            starts=self.starts,
            metrics={name: HistoryMetric.of(m) for name, m in self.metrics.items()},
            values={name: values_by_start(self.rounds, name) for name in self.metrics},
            stock_values={name: values_by_start(self.stock_rounds, name) for name in self.stock},
            suspects=self.suspects,
        )


def _completed(fingerprint: Fingerprint, results: Results) -> Fingerprint:
    """With what only a running engine says."""
    done = [s for s in results.starts if s.state == "completed"]
    revision = next((s.model_revision for s in done if s.model_revision), None)
    version = next((s.vllm_version for s in done if s.vllm_version), None)
    return fingerprint.model_copy(
        update={
            "model_revision": revision or fingerprint.model_revision,
            "vllm_version": fingerprint.vllm_version or version,
        }
    )
