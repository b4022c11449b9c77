"""A night from a frozen file to its result: surroundings checked, engines started, everything kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuner.clock import Clock
from tuner.domain.frozen import Frozen
from tuner.engine.installed import check_options, inspect_installed
from tuner.files import write_json
from tuner.freeze.baseline import rounds_by_start
from tuner.freeze.fingerprint import differences
from tuner.regress.night import NightPlan, NightResult, incomparable, watch
from tuner.regress.starts import EngineStarter, profile_of
from tuner.experiment.fingerprint import take_fingerprint
from tuner.experiment.choice import EngineChoice
from tuner.trial.progress import Progress

DEFAULT_ROUNDS = 3


@dataclass(frozen=True)
class NightRequest:
    """What `regress` was asked for."""

    frozen: Frozen
    choice: EngineChoice
    plan: NightPlan
    folder: Path
    """Engine logs and `night.json` land here."""
    seed: int
    allow_different: bool = False
    rounds: int | None = None


async def run_night(request: NightRequest, clock: Clock, progress: Progress) -> NightResult:
    """The night's result; `not comparable` without starting anything where it could prove nothing.

    EngineError when the installed engine lacks an option, or an engine or a round fails.
    """
    frozen = request.frozen
    rounds = request.rounds or rounds_at_freeze(frozen)
    profile = profile_of(frozen, rounds)
    fingerprint = await take_fingerprint(request.choice, profile)
    changes = differences(frozen.fingerprint, fingerprint)
    if any(not c.comparable for c in changes) and not request.allow_different:
        return incomparable(frozen, fingerprint, changes)
    installed = await inspect_installed(request.choice.launcher, {**request.choice.env, **frozen.engine_env})
    check_options(installed, frozen.engine_args)
    starter = EngineStarter(request.choice, profile, rounds, request.seed, request.folder, clock, progress)
    result = await watch(frozen, fingerprint, request.plan, starter, progress)
    result.notes.extend(starter.said)
    write_json(
        request.folder / "night.json",
        {
            "schema": "chunktune.night-result/1",
            **result.to_json(),
            "rounds": [[r.to_json() for r in start] for start in result.rounds],
            "control_rounds": [[r.to_json() for r in start] for start in result.control_rounds],
        },
    )
    return result


def rounds_at_freeze(frozen: Frozen) -> int:
    """Rounds a start, as the baseline had them at most."""
    return max((len(start) for start in rounds_by_start(frozen.baseline)), default=DEFAULT_ROUNDS)
