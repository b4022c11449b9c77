"""One candidate from launch to outcome. A trial is one engine start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tuner.clock import Clock
from tuner.domain.setting import Setting, Scalar
from tuner.domain.measurement import Measurement, metric
from tuner.domain.experiment import Diagnosis, Role, State, Trial, TrialTime
from tuner.domain.profile import Constraint
from tuner.engine.launch import command_line
from tuner.engine.policy import policy
from tuner.errors import EngineError, LoadError
from tuner.measure import summarize
from tuner.experiment.store import StudyDirectory
from tuner.trial.progress import Progress
from tuner.trial.rounds import counting, enough_rounds
from tuner.experiment.session import LiveSession, RoundResult, SessionConfig, engine_session


@dataclass(frozen=True)
class TrialPlan:
    """What to run, and under which number it is kept."""

    number: int
    role: Role
    label: str
    candidate: Setting
    config: SessionConfig
    rounds: int
    final_of: int | None = None


UNDER_WAY = "the trial was under way"
"""The message of a trial whose run wrote nothing more about it, as after a kill."""


@dataclass
class _Progressing:
    """A trial under way: what is known so far."""

    plan: TrialPlan
    clock: Clock
    began_s: float
    started_at: str
    results: list[RoundResult] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    effective_args: dict[str, Scalar] | None = None
    model_revision: str | None = None
    warnings: list[str] = field(default_factory=list)
    session: LiveSession | None = None

    def time(self) -> TrialTime:
        """Where its seconds went until now: without a session, all of them into the engine's start."""
        now_s = self.clock.monotonic_s()
        total_s, session = now_s - self.began_s, self.session
        if session is None:
            return TrialTime(total_s=total_s, engine_start_s=total_s)
        return TrialTime(
            total_s=total_s,
            engine_start_s=session.engine.start_s if session.engine is not None else 0.0,
            load_s=session.load_s,
            stop_s=0.0 if session.left_s is None else now_s - session.left_s,
        )


async def run_trial(plan: TrialPlan, directory: StudyDirectory, clock: Clock, progress: Progress) -> Trial:
    """Run one trial and keep it on disk from its start and after every round; failures are outcomes, not exceptions.

    Cancellation stops the engine, keeps the trial as `interrupted` and goes on up.
    """
    state = _Progressing(
        plan,
        clock,
        clock.monotonic_s(),
        clock.now().isoformat(timespec="seconds"),
        command=command_line(plan.config.launch_spec(), 0),
    )
    _write_under_way(state, directory)
    diagnosis: Diagnosis | None = None
    outcome: State = "interrupted"
    try:
        try:
            async with engine_session(
                plan.config,
                clock,
                on_stage=progress.stage,
                on_progress=progress.round_progress,
                on_open=lambda opened: _note_start(state, opened),
            ) as session:
                diagnosis = await _rounds(state, session, directory, clock, progress)
            outcome = _failed_as(diagnosis) if diagnosis else "completed"
        except EngineError as error:
            diagnosis = error.diagnosis
            outcome = _failed_as(diagnosis)
        except LoadError as error:
            diagnosis = Diagnosis(code=error.code, message=error.message, hint=error.hint)
            outcome = _failed_as(diagnosis)
    except asyncio.CancelledError:
        directory.write_trial(_trial(state, "interrupted", None))
        raise
    trial = _trial(state, outcome, diagnosis)
    directory.write_trial(trial)
    return trial


def _failed_as(diagnosis: Diagnosis) -> State:
    states: dict[str, State] = {"candidate": "infeasible", "load": "load_failed"}
    return states.get(policy(diagnosis.code), "engine_failed")


def _write_under_way(state: _Progressing, directory: StudyDirectory) -> None:
    directory.write_trial(_trial(state, "interrupted", Diagnosis(code="", message=UNDER_WAY)))


def _note_start(state: _Progressing, session: LiveSession) -> None:
    state.session = session
    state.command = session.command
    if session.engine is not None:
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
        _write_under_way(state, directory)

    return await enough_rounds(session, plan.rounds, f"trial-{plan.number}", clock, progress, keep)


def _trial(state: _Progressing, outcome: State, diagnosis: Diagnosis | None) -> Trial:
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
        hint=(diagnosis.hint or None) if diagnosis else None,
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
        time=state.time(),
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
