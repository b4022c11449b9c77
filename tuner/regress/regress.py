"""A run of `regress` from a frozen file to its result: surroundings checked, engines started, everything kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tuner.clock import Clock
from tuner.engine.installed import check_options, inspect_installed
from tuner.experiment.choice import EngineChoice
from tuner.experiment.events import Events
from tuner.experiment.fingerprint import take_fingerprint
from tuner.experiment.store import Store
from tuner.freeze.fingerprint import differences
from tuner.regress.measure import frozen_opener, measure, notes_of, profile_of, write_result
from tuner.regress.run import RunPlan, RunResult


@dataclass(frozen=True)
class RegressRequest:
    """What `regress` was asked for."""

    plan: RunPlan
    """With the fingerprint of the freeze, until today's is taken."""
    choice: EngineChoice
    store: Store
    seed: int
    allow_different: bool = False


async def run_regress(request: RegressRequest, clock: Clock, events: Events) -> RunResult:
    """The run's result; `not comparable` without starting anything where it could prove nothing.

    EngineError when the installed engine lacks an option, or an engine or a round fails.
    """
    frozen, store = request.plan.frozen, request.store
    profile = profile_of(frozen, request.plan.rounds)
    plan = dataclasses.replace(request.plan, fingerprint=await take_fingerprint(request.choice, profile))
    changes = differences(frozen.fingerprint, plan.fingerprint)
    if any(not c.comparable for c in changes) and not request.allow_different:
        return plan.not_comparable(changes)
    installed = await inspect_installed(request.choice.launcher, {**request.choice.env, **frozen.engine_env})
    check_options(installed, frozen.engine_args)
    opener = frozen_opener(profile, request.choice, store, seed=request.seed, clock=clock, events=events)
    results = await measure(plan.design(), store, opener, clock, events)
    result = plan.result(results)
    result.notes.extend(notes_of(results))
    write_result(store, "regress", result.to_json())
    return result
