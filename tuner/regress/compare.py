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
from tuner.regress.servers import server_setting
from tuner.regress.spread import Prior
from tuner.regress.verdict import Evidence, Judgement, MetricVerdict, Rules, Word, judge, overall, starts_by_stage
from tuner.space.knobs import is_live

IDS = ("A", "B")
SWITCHED_PRIOR = Prior(start_sd=0.01, start_dof=6.0, round_sd=0.03)
"""Of ratios within cycles: a setting's own difference from start to start, and that of rounds with equal arrivals."""
SERVERS_PRIOR = Prior(start_sd=0.0, start_dof=4.0, round_sd=0.03)
"""Between servers that run already there are no fresh starts: each cycle is an independent piece."""

Pair = tuple[Measurement, Measurement]


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    names: tuple[str, str]
    verdict: Word
    metrics: dict[str, MetricVerdict]
    simulated: bool
    differences: dict[str, tuple[Any, Any]] | None = None
    """What A and B are set to where they differ, by name; None for servers, whose settings are not known."""
    notes: list[str] = dataclasses.field(default_factory=list)

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
            "differences": None
            if self.differences is None
            else {name: {"a": a, "b": b} for name, (a, b) in self.differences.items()},
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
    sides: tuple[Side, Side] | None = None
    """Two frozen configurations; None: two servers."""
    shared: StartPlan | None = None
    """A start on which both sides are measured."""
    differences: dict[str, tuple[Any, Any]] | None = None

    @classmethod
    def of_servers(cls, urls: tuple[str, str], gate: Sequence[str], rules: Rules, *, cycles: int) -> ComparePlan:
        """Servers that run already."""
        rules = dataclasses.replace(rules, prior=SERVERS_PRIOR)
        label = " and ".join(f"{side} {url}" for side, url in zip(IDS, urls, strict=True))
        settings = tuple(server_setting(side) for side in IDS)
        shared = StartPlan("compare", label, {}, settings, live=True)
        return cls(urls, gate, rules, cycles, shared=shared)

    @classmethod
    def of_files(
        cls,
        names: tuple[str, str],
        a: Frozen,
        b: Frozen,
        rules: Rules,
        *,
        starts: int,
        rounds: int,
        live: bool,
    ) -> ComparePlan:
        """Frozen configurations; with `live` on shared starts where their boot options agree."""
        differing = argument_differences(a, b)
        sides = tuple(
            Side(Named(name, own_setting(f, differing)), f.engine_args, f.reuse_budget)
            for name, f in zip(IDS, (a, b), strict=True)
        )
        shared = shared_start(a, b) if live else None
        if shared is not None:
            rules = dataclasses.replace(rules, prior=SWITCHED_PRIOR)
        differences = configuration_differences(a, b)
        return cls(names, a.regress_metrics, rules, starts, rounds, (sides[0], sides[1]), shared, differences)

    def starts(self, stage: int) -> list[StartPlan]:
        """Every start up to the end of this stage: a single one of servers, else shared ones, or A B B A."""
        if self.sides is None:
            assert self.shared is not None, "servers are one start"
            return [self.shared]
        pairs = range(starts_by_stage(self.planned, stage))
        if self.shared is not None:
            return [self.shared for _ in pairs]
        return [side.start("compare") for pair in pairs for side in turn(self.sides, pair)]

    def cycles(self, stage: int) -> int:
        """Cycles on each start at the end of this stage."""
        return starts_by_stage(self.planned, stage) if self.sides is None else self.rounds

    def design(self) -> Staged:
        """Which start and which round come next."""
        return Staged(self.starts, self.cycles, self.judge)

    def judge(self, results: Results, stage: int) -> Judgement:
        """The verdict on B against A."""
        judgement = judge(self._evidence(results), self.gate, self.rules, stage=stage)
        a, b = self._rounds(results)
        metrics = count_failures(judgement.metrics, a, b, sides=IDS, other="inconclusive")
        word = overall([metrics[name].verdict for name in self.gate])
        return dataclasses.replace(judgement, metrics=metrics, verdict=word)

    def result(self, results: Results) -> Comparison:
        """Everything that is known once the design is done."""
        judged = self.design().judged(results)
        simulated = any(s.simulated for s in results.starts)
        return Comparison(self.names, judged.verdict, judged.metrics, simulated, self.differences)

    def _rounds(self, results: Results) -> tuple[list[list[Measurement]], list[list[Measurement]]]:
        if self.shared is None:
            return rounds_of(results, "A"), rounds_of(results, "B")
        pairs = self._pairs(results)
        return [[a for a, _ in start] for start in pairs], [[b for _, b in start] for start in pairs]

    def _pairs(self, results: Results) -> list[list[Pair]]:
        """Rounds of A and B in the same cycle, by start; on servers each pair stands for itself."""
        by_start = [_pairs_of(results, s.number) for s in results.starts]
        if self.sides is None:
            return [[pair] for start in by_start for pair in start]
        return [start for start in by_start if start]

    def _evidence(self, results: Results) -> dict[str, Evidence]:
        """The gate, and those of the shown metrics that both sides have above 0."""
        a, b = self._rounds(results)
        found = {}
        for name in dict.fromkeys([*self.gate, *shown_beside(r for side in (a, b) for start in side for r in start)]):
            if self.shared is None:
                evidence = Evidence(values_by_start(a, name), values_by_start(b, name))
            else:
                evidence = _paired(self._pairs(results), name)
            values = [v for side in (evidence.then, evidence.now) for start in side for v in start]
            if name in self.gate or (values and min(values) > 0 and any(evidence.then) and any(evidence.now)):
                found[name] = evidence
        return found


def argument_differences(a: Frozen, b: Frozen) -> list[str]:
    """The engine options in which two files differ."""
    names = dict.fromkeys([*a.engine_args, *b.engine_args])
    return [n for n in names if a.engine_args.get(n) != b.engine_args.get(n)]


def configuration_differences(a: Frozen, b: Frozen) -> dict[str, tuple[Any, Any]]:
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
    names = dict.fromkeys([*sides[0], *sides[1]])
    return {n: (sides[0].get(n), sides[1].get(n)) for n in names if sides[0].get(n) != sides[1].get(n)}


def shared_args(a: Frozen, b: Frozen) -> dict[str, Scalar]:
    """The engine options that two files have in common."""
    differing = argument_differences(a, b)
    return {name: value for name, value in a.engine_args.items() if name not in differing}


def shared_start(a: Frozen, b: Frozen) -> StartPlan | None:
    """A start on which both configurations can be measured, booted with the larger chunk; None where they cannot.

    They have to agree in everything but live knobs, and each has to name its chunk size.
    """
    differing = argument_differences(a, b)
    chunks = [f.engine_args.get(CHUNK_KNOB) for f in (a, b)]
    sizes = [c for c in chunks if isinstance(c, int)]
    agree = a.model == b.model and a.engine_env == b.engine_env and all(map(is_live, differing))
    if not agree or len(sizes) < 2:
        return None
    return StartPlan(
        purpose="compare",
        label=" and ".join(IDS),
        engine_args={**shared_args(a, b), CHUNK_KNOB: max(sizes)},
        settings=tuple(Named(name, own_setting(f, differing)) for name, f in zip(IDS, (a, b), strict=True)),
        live=True,
        live_budget=a.reuse_budget is not None or b.reuse_budget is not None,
    )


def own_setting(frozen: Frozen, differing: Sequence[str]) -> Setting:
    """What a side is set to where the two differ."""
    knobs = {n: frozen.engine_args[n] for n in differing if frozen.engine_args.get(n) is not None}
    return Setting(knobs=knobs, reuse_budget=frozen.reuse_budget)


def _pairs_of(results: Results, start: int) -> list[Pair]:
    rows = {(r.cycle, r.setting): r.measurement for r in results.kept(starts=[start])}
    return [(a, rows[cycle, "B"]) for (cycle, side), a in rows.items() if side == "A" and (cycle, "B") in rows]


def _paired(pairs: Sequence[Sequence[Pair]], name: str) -> Evidence:
    """One metric of the pairs in which both sides have it."""
    values = [[(metric(a, name), metric(b, name)) for a, b in start] for start in pairs]
    both = [[(x, y) for x, y in start if x is not None and y is not None] for start in values]
    return Evidence([[x for x, _ in s] for s in both], [[y for _, y in s] for s in both], paired=True)


def is_url(text: str) -> bool:
    """Whether a side of a comparison is a server's address rather than a file."""
    return text.startswith(("http://", "https://"))


def same_kind(a: str, b: str) -> bool:
    """True for two URLs, False for two files; UsageError for one of each."""
    if is_url(a) != is_url(b):
        raise UsageError(
            f"{a} and {b} are a server and a file: they cannot be measured the same way",
            "Give two URLs (with http:// or https:// before them), or two frozen files.",
        )
    return is_url(a)
