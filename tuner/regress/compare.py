"""Two servers, or two frozen configurations, against each other. Pure.

The verdict is B's: `regressed` when B is worse than A. Servers, and configurations that differ only in what can be
switched live, are measured in the same start, in turn within each cycle, and judged by the ratios within cycles.
Others get fresh starts in turn (A B B A).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.domain.experiment import Results
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Measurement, metric
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar, Setting
from tuner.errors import UsageError
from tuner.experiment.design import Named, StartPlan
from tuner.regress.design import Side, Staged, rounds_of, turn
from tuner.regress.limits import count_failures, values_by_start
from tuner.regress.run import shown_beside
from tuner.regress.verdict import Evidence, Judgement, MetricVerdict, Rules, Word, judge, overall, starts_by_stage
from tuner.space.knobs import is_live

IDS = ("A", "B")
Differences = dict[str, tuple[Any, Any]]
Rounds = list[list[Measurement]]


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    names: tuple[str, str]
    verdict: Word
    metrics: dict[str, MetricVerdict]
    simulated: bool
    differences: Differences | None
    """What A and B are set to where they differ, by name; None for servers, whose settings are not known."""
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`; `baseline` is A, `now` is B."""
        return {
            "verdict": self.verdict,
            "simulated": self.simulated,
            "a": self.names[0],
            "b": self.names[1],
            "metrics": {name: m.to_json() for name, m in self.metrics.items()},
            "change_point": None,
            "suspects": [],
            "differences": self.differences and {n: {"a": a, "b": b} for n, (a, b) in self.differences.items()},
            "notes": self.notes,
        }


@dataclass(frozen=True)
class ComparePlan:
    """What is measured, and how it is judged."""

    names: tuple[str, str]
    gate: Sequence[str]
    rules: Rules
    planned: int
    """Starts of each side in the first stage; of servers, cycles."""
    rounds: int = 1
    """Of each side and start."""
    files: tuple[Frozen, Frozen] | None = None
    """Two frozen configurations; None: two servers, measured on `shared`."""
    shared: StartPlan | None = None
    """A start on which both sides are measured."""

    def starts(self, stage: int) -> list[StartPlan]:
        """Every start up to the end of this stage: a single one of servers, else shared ones, or A B B A."""
        pairs = range(1 if self.files is None else starts_by_stage(self.planned, stage))
        if self.shared is not None:
            return [self.shared for _ in pairs]
        assert self.files is not None, "servers share their start"
        named = zip(settings_of(*self.files), self.files, strict=True)
        sides = [Side(n, f.engine_args, f.reuse_budget) for n, f in named]
        return [side.start("compare") for pair in pairs for side in turn(sides, pair)]

    def cycles(self, stage: int) -> int:
        """Cycles on each start at the end of this stage."""
        return starts_by_stage(self.planned, stage) if self.files is None else self.rounds

    def design(self) -> Staged:
        """Which start and which round come next."""
        return Staged(self.starts, self.cycles, self.judge)

    def judge(self, results: Results, stage: int) -> Judgement:
        """The verdict on B against A."""
        a, b = self._rounds(results)
        rules = dataclasses.replace(self.rules, both_ways=True)
        if self.files is None:
            rules = dataclasses.replace(rules, pair_start_sd=0.0)
        judgement = judge(self._evidence(a, b), self.gate, rules, stage=stage)
        metrics = count_failures(judgement.metrics, a, b, sides=IDS, other="inconclusive")
        word = overall([metrics[name].verdict for name in self.gate])
        return dataclasses.replace(judgement, metrics=metrics, verdict=word)

    def result(self, results: Results, notes: Sequence[str] = ()) -> Comparison:
        """Everything that is known once the design is done."""
        judged = self.design().judged(results)
        simulated = any(s.simulated for s in results.starts)
        differences = configuration_differences(*self.files) if self.files else None
        return Comparison(self.names, judged.verdict, judged.metrics, simulated, differences, list(notes))

    def _rounds(self, results: Results) -> tuple[Rounds, Rounds]:
        """By start, those of shared starts in the order of their cycles."""
        return rounds_of(results, "A"), rounds_of(results, "B")

    def _evidence(self, a: Rounds, b: Rounds) -> dict[str, Evidence]:
        """The gate, and those of the shown metrics that both sides have above 0."""
        found = {}
        for name in dict.fromkeys([*self.gate, *shown_beside(r for side in (a, b) for start in side for r in start)]):
            unpaired = Evidence(values_by_start(a, name), values_by_start(b, name))
            evidence = unpaired if self.shared is None else _paired(a, b, name)
            usable = all(v > 0 for side in (evidence.then, evidence.now) for start in side for v in start)
            if name in self.gate or (usable and any(evidence.then) and any(evidence.now)):
                found[name] = evidence
        return found


def configuration_differences(a: Frozen, b: Frozen) -> Differences:
    """Model, engine options, engine environment and reuse budget where they differ; None where a side has none."""
    sides = [
        {
            "model": f.model,
            **f.engine_args,
            **{f"env {name}": value for name, value in f.engine_env.items()},
            **{f"reuse_budget.{name}": value for name, value in (f.reuse_budget or ReuseBudget()).to_json().items()},
        }
        for f in (a, b)
    ]
    return _differing(*sides)


def common_args(a: Frozen, b: Frozen) -> dict[str, Scalar]:
    """The engine options that two files agree in."""
    differing = _differing(a.engine_args, b.engine_args)
    return {name: value for name, value in a.engine_args.items() if name not in differing}


def shared_start(a: Frozen, b: Frozen) -> StartPlan | None:
    """A start on which both configurations can be measured, booted with the larger chunk; None where they cannot.

    They have to agree in everything but live knobs, and each has to name its chunk size.
    """
    sizes = [c for c in (a.engine_args.get(CHUNK_KNOB), b.engine_args.get(CHUNK_KNOB)) if isinstance(c, int)]
    agree = a.model == b.model and a.engine_env == b.engine_env
    if not agree or len(sizes) < 2 or not all(map(is_live, _differing(a.engine_args, b.engine_args))):
        return None
    return StartPlan(
        purpose="compare",
        label=" and ".join(IDS),
        engine_args={**common_args(a, b), CHUNK_KNOB: max(sizes)},
        settings=settings_of(a, b),
        live=True,
        live_budget=a.reuse_budget is not None or b.reuse_budget is not None,
    )


def settings_of(a: Frozen, b: Frozen) -> tuple[Named, ...]:
    """What the sides are set to where they differ, and their chunk sizes."""
    shown = [CHUNK_KNOB, *_differing(a.engine_args, b.engine_args)]
    knobs = [{n: v for n in shown if (v := f.engine_args.get(n)) is not None} for f in (a, b)]
    sides = zip(IDS, knobs, (a, b), strict=True)
    return tuple(Named(name, Setting(knobs=k, reuse_budget=f.reuse_budget)) for name, k, f in sides)


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Differences:
    return {n: (a.get(n), b.get(n)) for n in dict.fromkeys([*a, *b]) if a.get(n) != b.get(n)}


def _paired(a: Rounds, b: Rounds, name: str) -> Evidence:
    """One metric of the cycles in which both sides have it."""
    then: list[list[float]] = []
    now: list[list[float]] = []
    for start in zip(a, b, strict=True):
        values = [(metric(x, name), metric(y, name)) for x, y in zip(*start, strict=True)]
        then.append([x for x, y in values if x is not None and y is not None])
        now.append([y for x, y in values if x is not None and y is not None])
    return Evidence(then, now, paired=True)


def same_kind(a: str, b: str) -> bool:
    """True for two URLs, False for two files; UsageError for one of each."""
    kinds = {text.startswith(("http://", "https://")) for text in (a, b)}
    if len(kinds) > 1:
        raise UsageError(
            f"{a} and {b} are a server and a file: they cannot be measured the same way",
            "Give two URLs (with http:// or https:// before them), or two frozen files.",
        )
    return kinds.pop()
