"""Two servers, or two frozen configurations, against each other: interleaved A B B A, one verdict.

The verdict is B's: `regressed` when B is worse than A.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.clock import Clock
from tuner.domain.setting import ReuseBudget
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Measurement
from tuner.domain.experiment import Trial, TrialTime
from tuner.domain.units import counted
from tuner.domain.workload import Workload
from tuner.errors import LoadError, UsageError
from tuner.load.target import Target
from tuner.regress.limits import values_by_start
from tuner.regress.night import shown_beside, suspicion
from tuner.regress.spread import Prior
from tuner.regress.starts import Arm, Starter
from tuner.regress.verdict import Evidence, MetricVerdict, NightVerdict, Rules, Word, judge_night, starts_by_look
from tuner.trial.progress import Progress
from tuner.trial.rounds import counting, enough_rounds
from tuner.experiment.session import RoundResult, Session, remote_session

ROUND_PRIOR = Prior(start_sd=0.0, start_dof=4.0, round_sd=0.02)
"""Between servers that run already there are no fresh starts: rounds are the independent pieces."""


@dataclass(frozen=True)
class Comparison:
    """What came of it."""

    names: tuple[str, str]
    verdict: Word
    metrics: dict[str, MetricVerdict]
    suspects: list[str]
    rounds: tuple[list[list[Measurement]], list[list[Measurement]]]
    """By side and start; on a running server each round stands for itself."""
    simulated: bool = False
    differences: dict[str, tuple[Any, Any]] | None = None
    """What A and B are set to where they differ, by name; None for servers, whose settings are not known."""

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`; `baseline` is A, `now` is B."""
        return {
            "verdict": self.verdict,
            "simulated": self.simulated,
            "a": self.names[0],
            "b": self.names[1],
            "metrics": {name: m.to_json() for name, m in self.metrics.items()},
            "suspects": self.suspects,
            "differences": None
            if self.differences is None
            else {name: {"a": a, "b": b} for name, (a, b) in self.differences.items()},
        }


async def compare_servers(
    a: Target,
    b: Target,
    workload: Workload,
    gate: Sequence[str],
    *,
    rounds: int,
    rules: Rules,
    seed: int,
    clock: Clock,
    progress: Progress,
) -> Comparison:
    """Rounds on two running servers, turn about; a suspicion brings more rounds, up to the bound.

    LoadError when a server cannot be used, or too many of its rounds do not count.
    """
    rules = dataclasses.replace(rules, prior=ROUND_PRIOR)
    done: dict[str, list[list[Measurement]]] = {"A": [], "B": []}
    verdict = NightVerdict("ok", {}, look_again=False)
    progress.study_started(2 * rounds, kind="comparison", unit="round")
    progress.stage("warming up A and B")
    async with (
        remote_session(a, workload, seed=seed, clock=clock, on_progress=progress.round_progress) as session_a,
        remote_session(b, workload, seed=seed, clock=clock, on_progress=progress.round_progress) as session_b,
    ):
        sessions: dict[str, Session] = {"A": session_a, "B": session_b}
        for look in range(1, rules.looks + 1):
            while len(done["B"]) < starts_by_look(rounds, look):
                for side in turn(len(done["B"])):
                    number = len(done[side]) + 1
                    done[side].append([await _counting_round(sessions[side], side, number, clock, progress)])
            verdict = judge_night(evidence(done["A"], done["B"], gate), gate, rules, look=look)
            if not verdict.look_again:
                break
            _more(progress, verdict, rounds, look + 1, "round")
        simulated = session_a.facts.simulated or session_b.facts.simulated
    return Comparison((a.base, b.base), verdict.verdict, verdict.metrics, [], (done["A"], done["B"]), simulated)


async def compare_configurations(
    a: Arm,
    b: Arm,
    names: tuple[str, str],
    gate: Sequence[str],
    *,
    starts: int,
    rules: Rules,
    starter: Starter,
    progress: Progress,
    simulated: bool = False,
    differences: dict[str, tuple[Any, Any]] | None = None,
) -> Comparison:
    """Fresh starts of two configurations, turn about; a suspicion brings more starts, up to the bound.

    `differences` is what is known of how they differ, for the result.
    """
    done: dict[str, list[list[Measurement]]] = {"A": [], "B": []}
    arms = {"A": a, "B": b}
    verdict = NightVerdict("ok", {}, look_again=False)
    progress.study_started(2 * starts, kind="comparison", unit="start")
    for look in range(1, rules.looks + 1):
        while len(done["B"]) < starts_by_look(starts, look):
            for side in turn(len(done["B"])):
                result = await starter.start(arms[side], len(done["A"]) + len(done["B"]) + 1)
                done[side].append(result.rounds)
        verdict = judge_night(evidence(done["A"], done["B"], gate), gate, rules, look=look)
        if not verdict.look_again:
            break
        _more(progress, verdict, starts, look + 1, "start")
    rounds = (done["A"], done["B"])
    return Comparison(names, verdict.verdict, verdict.metrics, [], rounds, simulated, differences)


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


def _more(progress: Progress, verdict: NightVerdict, planned: int, look: int, noun: str) -> None:
    total = starts_by_look(planned, look)
    each = total - starts_by_look(planned, look - 1)
    progress.replanned(2 * total, f"{suspicion(verdict)}: {counted(each, f'more {noun}')} of A and of B")


def turn(pair: int) -> tuple[str, str]:
    """Who goes first in pair number `pair` (from 0): A B, then B A, so that a drift of the machine cancels."""
    return ("A", "B") if pair % 2 == 0 else ("B", "A")


def evidence(
    a: Sequence[Sequence[Measurement]], b: Sequence[Sequence[Measurement]], gate: Sequence[str]
) -> dict[str, Evidence]:
    """The gate, and those of the shown metrics that both sides have above 0."""
    found = {}
    for name in dict.fromkeys([*gate, *shown_beside(r for side in (a, b) for start in side for r in start)]):
        one = Evidence(values_by_start(a, name), values_by_start(b, name))
        usable = all(v > 0 for side in (one.baseline, one.tonight) for start in side for v in start)
        if name in gate or (usable and any(one.baseline) and any(one.tonight)):
            found[name] = one
    return found


async def _counting_round(session: Session, side: str, number: int, clock: Clock, progress: Progress) -> Measurement:
    results: list[RoundResult] = []

    def keep(so_far: list[RoundResult]) -> None:
        results[:] = so_far

    name = f"round {number} on {side}"
    began_s, started_at = clock.monotonic_s(), clock.now().isoformat(timespec="seconds")
    progress.trial_started(number, name)
    key = f"{side}/round-{number}"
    diagnosis = await enough_rounds(session, 1, key, clock, progress, keep, name="under load")
    if diagnosis is not None:
        raise LoadError(diagnosis.code, f"{side}: {diagnosis.message}", diagnosis.hint)
    measured = counting(results)[0].measurement
    progress.trial_finished(
        Trial(
            number=number,
            role="candidate",
            label=name,
            state="completed",
            engine_args={},
            median=measured,
            started_at=started_at,
            time=TrialTime(total_s=clock.monotonic_s() - began_s),
        )
    )
    return measured


def is_url(text: str) -> bool:
    """Whether a side of a comparison is a server's address rather than a file."""
    return text.startswith(("http://", "https://"))


def same_kind(a: str, b: str) -> bool:
    """True for two URLs, False for two files; UsageError for one of each."""
    if is_url(a) != is_url(b):
        raise UsageError(
            f"{a} and {b} are a server and a file: there is nothing common to measure",
            "Give two URLs (with http:// or https:// before them), or two frozen files.",
        )
    return is_url(a)
