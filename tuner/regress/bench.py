"""A server that runs already, measured in one start."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tuner.clock import Clock
from tuner.domain.profile import Profile
from tuner.domain.setting import Setting
from tuner.experiment.design import Named, StartPlan, StudyStopped
from tuner.experiment.events import Events
from tuner.experiment.runner import run
from tuner.experiment.session import Session, open_server
from tuner.experiment.store import Store
from tuner.load.target import Target
from tuner.measure import summarize
from tuner.regress.design import Staged
from tuner.regress.measure import failure_of
from tuner.report.bench import BenchResult


async def bench(
    target: Target, profile: Profile, store: Store, *, seed: int, clock: Clock, events: Events
) -> BenchResult:
    """`profile.rounds` rounds on the server; a result without that many when too many are discarded.

    EngineError and LoadError when there is not even one that is kept or discarded. `store` has what an interrupted
    bench measured.
    """

    def opener(_: StartPlan, __: int) -> AbstractAsyncContextManager[Session]:
        return open_server(
            target,
            profile.workload,
            constraints=tuple(profile.constraints),
            seed=seed,
            block_size=profile.engine.block_size,
            clock=clock,
            events=events,
        )

    design = bench_design(target.base, profile.rounds)
    starts, text = design.outlook(store.results())
    events.expected(starts, None, text)
    try:
        await run(design, store, opener, clock, events)
    except StudyStopped as stopped:
        if not store.results().rounds:
            raise failure_of(stopped.start, store) from None
    return bench_result(store, profile)


def bench_design(label: str, rounds: int) -> Staged:
    """One start of one setting: whatever the server runs."""
    plan = StartPlan("bench", label, {}, (Named("server", Setting(knobs={"server": label})),), live=False)
    return Staged(lambda _: [plan], lambda _: rounds, repeats=0)


def bench_result(store: Store, profile: Profile) -> BenchResult:
    """What the one start in `store` amounts to, also when it was interrupted."""
    results = store.results()
    start, kept = results.starts[-1], results.kept()
    if not kept:
        return BenchResult(start, results.rounds, warnings=start.warnings)
    observations = [store.read_observation(r.start, r.round) for r in kept]
    summary = summarize([r.measurement for r in kept], observations)
    return BenchResult(
        start,
        results.rounds,
        summary.median,
        summary.pooled,
        summary.ci95,
        profile.constraints,
        [*start.warnings, *summary.warnings],
    )
