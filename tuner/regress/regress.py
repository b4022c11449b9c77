"""A run of `regress` from a frozen file to its result: surroundings checked, engines started, everything kept."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tuner.clock import Clock
from tuner.domain.frozen import Frozen
from tuner.engine.installed import check_options, inspect_installed
from tuner.experiment.choice import EngineChoice
from tuner.experiment.events import Events
from tuner.experiment.fingerprint import take_fingerprint
from tuner.experiment.session import engine_opener
from tuner.experiment.store import Store
from tuner.files import write_json
from tuner.freeze.fingerprint import differences
from tuner.freeze.measured import rounds_by_start
from tuner.regress.measure import measure, notes_of, profile_of, record_dir
from tuner.regress.run import RunPlan, RunResult

DEFAULT_ROUNDS = 3
RESULT_SCHEMA = "chunktune.result/1"


@dataclass(frozen=True)
class RegressRequest:
    """What `regress` was asked for."""

    frozen: Frozen
    choice: EngineChoice
    store: Store
    seed: int
    options: dict[str, Any]
    """The fields of `RunPlan` that are known before the surroundings are."""
    allow_different: bool = False


async def run_regress(request: RegressRequest, clock: Clock, events: Events) -> RunResult:
    """The run's result; `not comparable` without starting anything where it could prove nothing.

    EngineError when the installed engine lacks an option, or an engine or a round fails.
    """
    frozen, store = request.frozen, request.store
    rounds = request.options.get("rounds") or rounds_at_freeze(frozen)
    profile = profile_of(frozen, rounds)
    plan = RunPlan(
        frozen=frozen,
        fingerprint=await take_fingerprint(request.choice, profile),
        **{**request.options, "rounds": rounds},
    )
    changes = differences(frozen.fingerprint, plan.fingerprint)
    if any(not c.comparable for c in changes) and not request.allow_different:
        return plan.not_comparable(changes)
    installed = await inspect_installed(request.choice.launcher, {**request.choice.env, **frozen.engine_env})
    check_options(installed, frozen.engine_args)
    opener = engine_opener(
        profile,
        request.choice,
        seed=request.seed,
        log_path=store.engine_log,
        record_dir=record_dir(store),
        clock=clock,
        events=events,
    )
    results = await measure(plan.design(), store, opener, clock, events)
    result = plan.result(results)
    result.notes.extend(notes_of(results))
    write_json(store.path / "result.json", {"schema": RESULT_SCHEMA, "purpose": "regress", **result.to_json()})
    return result


def rounds_at_freeze(frozen: Frozen) -> int:
    """Rounds of a start, as there were at the freeze at most."""
    return max((len(start) for start in rounds_by_start(frozen.measured)), default=DEFAULT_ROUNDS)
