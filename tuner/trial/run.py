"""One candidate from launch to outcome. A trial is one engine start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tuner.clock import Clock
from tuner.domain.candidate import Candidate, Scalar
from tuner.domain.measurement import Measurement, metric
from tuner.domain.outcome import Diagnosis, Role, State, Trial, TrialTime
from tuner.domain.profile import Constraint
from tuner.engine.launch import command_line
from tuner.engine.policy import policy
from tuner.errors import EngineError, LoadError
from tuner.measure import summarize
from tuner.trial.artifacts import StudyDirectory
from tuner.trial.progress import Progress
from tuner.trial.rounds import counting, enough_rounds
from tuner.trial.session import LiveSession, RoundResult, SessionConfig, engine_session


@dataclass(frozen=True)
class TrialPlan:
    """What to run, and under which number it is kept."""

    number: int
    role: Role
    label: str
    candidate: Candidate
    config: SessionConfig
    rounds: int
    final_of: int | None = None


@dataclass
class _Progressing:
    """A trial under way: what is known so far."""

    plan: TrialPlan
    started_at: str
    results: list[RoundResult] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    effective_args: dict[str, Scalar] | None = None
    model_revision: str | None = None
    warnings: list[str] = field(default_factory=list)
    start_s: float = 0.0


async def run_trial(plan: TrialPlan, directory: StudyDirectory, clock: Clock, progress: Progress) -> Trial:
    """Run one trial and keep it on disk after every round; failures are outcomes, not exceptions.

    Cancellation stops the engine, keeps the trial as `interrupted` and goes on up.
    """
    began_s = clock.monotonic_s()
    state = _Progressing(
        plan, clock.now().isoformat(timespec="seconds"), command=command_line(plan.config.launch_spec(), 0)
    )
    session: LiveSession | None = None
    left_s = began_s
    diagnosis: Diagnosis | None = None
    outcome: State = "interrupted"
    try:
        try:
            async with engine_session(
                plan.config, clock, on_stage=progress.stage, on_progress=progress.round_progress
            ) as session:
                _note_start(state, session)
                diagnosis = await _rounds(state, session, directory, clock, progress)
                left_s = clock.monotonic_s()
            outcome = _failed_as(diagnosis) if diagnosis else "completed"
        except EngineError as error:
            diagnosis = error.diagnosis
            outcome = _failed_as(diagnosis)
        except LoadError as error:
            diagnosis = Diagnosis(code=error.code, message=error.message, mend=error.mend)
            outcome = _failed_as(diagnosis)
    except asyncio.CancelledError:
        directory.write_trial(_trial(state, "interrupted", None, _time(state, session, began_s, left_s, clock)))
        raise
    trial = _trial(state, outcome, diagnosis, _time(state, session, began_s, left_s, clock))
    directory.write_trial(trial)
    return trial


def _failed_as(diagnosis: Diagnosis) -> State:
    states: dict[str, State] = {"candidate": "infeasible", "load": "load_failed"}
    return states.get(policy(diagnosis.code), "engine_failed")


def _note_start(state: _Progressing, session: LiveSession) -> None:
    state.command = session.command
    if session.engine is not None:
        state.start_s = session.engine.start_s
        state.effective_args = dict(session.engine.effective.args)
        state.model_revision = session.engine.effective.model_revision
    state.warnings += session.planner.labels


async def _rounds(
    state: _Progressing, session: LiveSession, directory: StudyDirectory, clock: Clock, progress: Progress
) -> Diagnosis | None:
    plan = state.plan

    def keep(results: list[RoundResult]) -> None:
        state.results = list(results)
        last = results[-1]
        directory.write_round(plan.number, len(results), last.observation, last.timeline)
        under_way = Diagnosis(code="", message="the trial was under way")
        directory.write_trial(_trial(state, "interrupted", under_way, TrialTime(load_s=session.load_s)))

    return await enough_rounds(session, plan.rounds, f"trial-{plan.number}", clock, progress, keep)


def _time(state: _Progressing, session: LiveSession | None, began_s: float, left_s: float, clock: Clock) -> TrialTime:
    total_s = clock.monotonic_s() - began_s
    load_s = session.load_s if session else 0.0
    stop_s = clock.monotonic_s() - left_s if session and left_s > began_s else 0.0
    start_s = state.start_s if session else total_s
    return TrialTime(total_s=total_s, engine_start_s=start_s, load_s=load_s, stop_s=stop_s)


def _trial(state: _Progressing, outcome: State, diagnosis: Diagnosis | None, time: TrialTime) -> Trial:
    plan = state.plan
    rounds = [r.measurement for r in state.results]
    good = counting(state.results)
    summary = summarize([r.measurement for r in good], [r.observation for r in good]) if good else None
    median = summary.median if summary else None
    return Trial(
        number=plan.number,
        role=plan.role,
        label=plan.label,
        state=outcome,
        cause=(diagnosis.code or None) if diagnosis else None,
        message=diagnosis.message if diagnosis else None,
        mend=(diagnosis.mend or None) if diagnosis else None,
        bound=diagnosis.bound if diagnosis else None,
        simulated=plan.config.choice.simulated,
        engine_args=plan.config.args,
        effective_args=state.effective_args,
        model_revision=state.model_revision,
        knobs=plan.candidate.knobs,
        reuse_budget=plan.candidate.effective_budget,
        command=state.command,
        rounds=rounds,
        median=median,
        pooled=summary.pooled if summary else {},
        ci95=summary.ci95 if summary else {},
        violations=violations(median, plan.config.constraints) if median else [],
        warnings=[*state.warnings, *(summary.warnings if summary else [])],
        started_at=state.started_at,
        time=time,
        final_of=plan.final_of,
    )


def violations(median: Measurement, constraints: tuple[Constraint, ...]) -> list[str]:
    """The constraints that do not hold, in words; an unmeasured metric does not hold."""
    found = []
    for constraint in constraints:
        holds = constraint.holds(median)
        if holds is None:
            reason = median.unmeasured.get(constraint.metric.partition(".")[0], "no reason given")
            found.append(f"{constraint}: not measured ({reason})")
        elif not holds:
            found.append(f"{constraint}: {metric(median, constraint.metric):g}")
    return found
