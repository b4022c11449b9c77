"""A server that runs already, measured as a trial is; nothing of it goes to disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tuner.clock import Clock
from tuner.domain.experiment import Diagnosis, State, Trial, TrialTime
from tuner.domain.profile import Profile
from tuner.load.target import Target
from tuner.measure import summarize
from tuner.trial.progress import Progress
from tuner.trial.rounds import counting, enough_rounds
from tuner.trial.run import violations
from tuner.experiment.session import RoundResult, remote_session


async def bench_server(
    target: Target,
    profile: Profile,
    *,
    seed: int,
    clock: Clock,
    progress: Progress,
    on_interrupted: Callable[[Trial], None] | None = None,
) -> Trial:
    """Rounds against `target` until enough count; `load_failed` with the reason when too many do not.

    LoadError when the server cannot be used at all. Cancelled after a round that counts, `on_interrupted` gets
    the trial as far as it came before the cancellation goes on up.
    """
    began_s = clock.monotonic_s()
    started_at = clock.now().isoformat(timespec="seconds")
    results: list[RoundResult] = []
    labels: list[str] = []
    simulated = False
    load_s = 0.0

    def trial(state: State, diagnosis: Diagnosis | None = None) -> Trial:
        good = counting(results)
        summary = summarize([r.measurement for r in good], [r.observation for r in good]) if good else None
        return Trial(
            number=0,
            role="candidate",
            label=target.base,
            state=state,
            simulated=simulated,
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

    progress.study_started(1, kind="bench", unit="server")
    progress.trial_started(0, target.base)
    progress.stage("warming up")
    try:
        async with remote_session(
            target,
            profile.workload,
            constraints=tuple(profile.constraints),
            seed=seed,
            clock=clock,
            block_size=profile.engine.block_size,
            on_progress=progress.round_progress,
        ) as session:
            simulated = session.facts.simulated

            def keep(so_far: list[RoundResult]) -> None:
                nonlocal load_s
                results[:], labels[:], load_s = so_far, session.planner.labels, session.load_s

            diagnosis = await enough_rounds(session, profile.rounds, "bench", clock, progress, keep)
    except asyncio.CancelledError:
        if counting(results) and on_interrupted is not None:
            on_interrupted(trial("interrupted"))
        raise
    done = trial("completed") if diagnosis is None else trial("load_failed", diagnosis)
    progress.trial_finished(done)
    return done
