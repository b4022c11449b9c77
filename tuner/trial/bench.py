"""A server that runs already, measured as a trial is; nothing of it goes to disk."""

from __future__ import annotations

from tuner.clock import Clock
from tuner.domain.outcome import Trial, TrialTime
from tuner.domain.profile import Profile
from tuner.load.target import Target
from tuner.measure import summarize
from tuner.trial.progress import Progress
from tuner.trial.rounds import counting, enough_rounds
from tuner.trial.run import violations
from tuner.trial.session import RoundResult, remote_session


async def bench_server(target: Target, profile: Profile, *, seed: int, clock: Clock, progress: Progress) -> Trial:
    """Rounds against `target` until enough count; `load_failed` with the reason when too many do not.

    LoadError when the server cannot be used at all.
    """
    began_s = clock.monotonic_s()
    started_at = clock.now().isoformat(timespec="seconds")
    results: list[RoundResult] = []
    progress.study_started(1)
    progress.trial_started(0, target.base)
    progress.stage("warming up")
    async with remote_session(
        target,
        profile.workload,
        constraints=tuple(profile.constraints),
        seed=seed,
        clock=clock,
        block_size=profile.engine.block_size,
        on_progress=progress.round_progress,
    ) as session:

        def keep(so_far: list[RoundResult]) -> None:
            results[:] = so_far

        diagnosis = await enough_rounds(session, profile.rounds, "bench", clock, progress, keep)
        labels, load_s = session.planner.labels, session.load_s
    good = counting(results)
    summary = summarize([r.measurement for r in good], [r.observation for r in good]) if good else None
    trial = Trial(
        number=0,
        role="candidate",
        label=target.base,
        state="completed" if diagnosis is None else "load_failed",
        cause=diagnosis.code if diagnosis else None,
        message=diagnosis.message if diagnosis else None,
        engine_args={},
        rounds=[r.measurement for r in results],
        median=summary.median if summary else None,
        pooled=summary.pooled if summary else {},
        ci95=summary.ci95 if summary else {},
        violations=violations(summary.median, tuple(profile.constraints)) if summary else [],
        warnings=[*labels, *(summary.warnings if summary else [])],
        started_at=started_at,
        time=TrialTime(total_s=clock.monotonic_s() - began_s, load_s=load_s),
    )
    progress.trial_finished(trial)
    return trial
