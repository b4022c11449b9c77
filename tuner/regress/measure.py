"""A staged design carried out: its folder, what is told of it, and its failures as errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from tuner.clock import Clock
from tuner.domain.experiment import Diagnosis, Purpose, Results, Start
from tuner.domain.frozen import Frozen
from tuner.domain.profile import EngineSpec, Profile, Space
from tuner.domain.setting import CHUNK_KNOB, Scalar
from tuner.engine.leftovers import end_leftovers
from tuner.errors import EngineError, LoadError
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import SWITCH_REFUSED, StartPlan, Step, StudyStopped
from tuner.experiment.events import Events
from tuner.experiment.runner import run
from tuner.experiment.session import OpenSession, engine_opener
from tuner.experiment.store import Store
from tuner.files import write_json
from tuner.regress.design import Staged

RESULT_SCHEMA: Final = "chunktune.result/1"


def new_run(out: Path, now: datetime) -> Store:
    """The folder of a run that begins now, below `out`/runs; not made yet."""
    name = f"{now:%Y%m%dT%H%M%S}"
    paths = (out / "runs" / (name if n == 1 else f"{name}-{n}") for n in count(1))
    return Store(next(path for path in paths if not path.exists()))


def record_dir(store: Store) -> Path:
    """Where the engines of all runs are recorded, so that the next one finds what a killed one left behind."""
    return store.path.parent / ".running"


async def measure(design: Staged, store: Store, open_session: OpenSession, clock: Clock, events: Events) -> Results:
    """The results once the design is done. EngineError and LoadError: a start failed, and the run has no verdict."""
    for sentence in await end_leftovers(record_dir(store), clock):
        events.message(sentence)
    try:
        return await run(_Announced(design, events), store, open_session, clock, events)
    except StudyStopped as stopped:
        raise failure_of(stopped.start, store) from None


def failure_of(start: Start, store: Store) -> EngineError | LoadError:
    """What ended a run, as an error."""
    where = f"start {start.number}, {start.label}"
    where += "" if start.failed_setting in (None, start.label) else f", under {start.failed_setting}"
    code, message = start.cause or "unknown", f"{where}: {start.message}"
    switch_refused = start.live and code == SWITCH_REFUSED
    hint = "With --no-live each side gets starts of its own." if switch_refused else start.hint or ""
    if start.state == "load_failed":
        return LoadError(code, message, hint)
    return EngineError(Diagnosis(code=code, message=message, hint=hint, log_path=str(store.engine_log(start.number))))


def notes_of(results: Results) -> list[str]:
    """Sentences about starts that were repeated and rounds that were discarded."""
    notes = [
        f"start {s.number} ({s.label}) failed and was repeated: {s.message}"
        for s in results.starts
        if s.state != "completed"
    ]
    return notes + [
        f"start {r.start}: a round of {r.setting} was discarded: {r.reason}" for r in results.rounds if not r.kept
    ]


def write_result(store: Store, purpose: Purpose, result: dict[str, Any]) -> None:
    """What the run came to, beside what it measured."""
    write_json(store.path / "result.json", {"schema": RESULT_SCHEMA, "purpose": purpose, **result})


def frozen_opener(
    profile: Profile, choice: EngineChoice, store: Store, *, seed: int, clock: Clock, events: Events
) -> OpenSession:
    """Launches the engines of a run."""
    return engine_opener(
        profile,
        choice,
        seed=seed,
        log_path=store.engine_log,
        record_dir=record_dir(store),
        clock=clock,
        events=events,
    )


def profile_of(frozen: Frozen, rounds: int, args: Mapping[str, Scalar] | None = None) -> Profile:
    """The frozen file as a profile, with other engine options where `args` gives them."""
    return Profile(
        version=1,
        name=frozen.study.name,
        model=frozen.model,
        hardware=frozen.hardware,
        engine=EngineSpec.model_validate(
            {
                "args": frozen.engine_args if args is None else args,
                "env": frozen.engine_env,
                "startup_timeout": f"{frozen.startup_timeout_s:g}s",
            }
        ),
        workload=frozen.workload,
        rounds=rounds,
        space=Space(knobs={CHUNK_KNOB: [frozen.engine_args.get(CHUNK_KNOB)]}),
        objective=frozen.objective,
        constraints=frozen.constraints,
        regress_metrics=frozen.regress_metrics,
    )


@dataclass
class _Announced:
    """The design, and word of each stage that it adds."""

    design: Staged
    events: Events
    stage: int = 0

    def next_start(self, results: Results) -> StartPlan | None:
        self._announce(results)
        return self.design.next_start(results)

    def next_step(self, results: Results, start: Start) -> Step | None:
        self._announce(results)
        return self.design.next_step(results, start)

    def _announce(self, results: Results) -> None:
        stage = self.design.stage(results)
        if stage != self.stage:
            self.stage = stage
            starts, text = self.design.outlook(results)
            self.events.expected(starts, None, text)
