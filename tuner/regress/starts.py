"""Fresh engine starts with their rounds: what a night is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tuner.clock import Clock
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Measurement
from tuner.domain.experiment import Diagnosis, Trial, TrialTime
from tuner.domain.profile import EngineSpec, Profile, Space
from tuner.engine.leftovers import end_leftovers
from tuner.engine.policy import policy
from tuner.errors import EngineError, LoadError
from tuner.files import write_json
from tuner.measure import summarize
from tuner.experiment.choice import EngineChoice
from tuner.trial.progress import Progress
from tuner.trial.rounds import counting, enough_rounds
from tuner.experiment.session import RoundResult, SessionConfig, engine_session

ArmName = Literal["frozen", "stock", "A", "B"]


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a configuration under a name."""

    name: ArmName
    args: dict[str, Scalar]
    reuse_budget: ReuseBudget | None = None


@dataclass(frozen=True)
class StartResult:
    """One fresh start: the rounds that count."""

    rounds: list[Measurement]
    model_revision: str | None = None
    vllm_version: str | None = None
    notes: tuple[str, ...] = ()


class Starter(Protocol):
    """Starts an engine, measures it and stops it."""

    async def start(self, arm: Arm, number: int) -> StartResult:
        """Start number `number` (from 1, over all arms). EngineError or LoadError when there is no result."""
        ...


@dataclass
class EngineStarter:
    """The real one. Every start gets content of its own, new for each night through `seed`.

    A failure of the surroundings is tried once more on another fresh start, anything else is raised.
    """

    choice: EngineChoice
    profile: Profile
    rounds: int
    seed: int
    folder: Path
    """Engine logs land here."""
    clock: Clock
    progress: Progress
    said: list[str] = field(default_factory=list)

    async def start(self, arm: Arm, number: int) -> StartResult:
        self.said += await end_leftovers(self._record_dir, self.clock)
        try:
            return await self._once(arm, number, "")
        except EngineError as error:
            if policy(error.diagnosis.code) != "environment":
                raise
            self.said.append(f"start {number} ({arm.name}) failed and was repeated: {error.message}")
            self.progress.message(self.said[-1])
            return await self._once(arm, number, "-again")

    @property
    def _record_dir(self) -> Path:
        return self.folder / ".running"

    async def _once(self, arm: Arm, number: int, suffix: str) -> StartResult:
        name, label = f"start-{number:02d}-{arm.name}{suffix}", f"start {number}, {arm.name}"
        began_s, started_at = self.clock.monotonic_s(), self.clock.now().isoformat(timespec="seconds")
        self.progress.trial_started(number, label)
        config = SessionConfig.of_profile(
            self.profile,
            self.choice,
            args=arm.args,
            reuse_budget=arm.reuse_budget,
            seed=self.seed,
            log_path=self.folder / f"{name}.log",
            record_dir=self._record_dir,
        )
        kept: list[RoundResult] = []

        def keep(results: list[RoundResult]) -> None:
            kept[:] = results

        async with engine_session(
            config, self.clock, on_stage=self.progress.stage, on_progress=self.progress.round_progress
        ) as session:
            diagnosis = await enough_rounds(session, self.rounds, name, self.clock, self.progress, keep)
            effective = session.effective
        if diagnosis is not None:
            raise _load_error(diagnosis, name)
        good = counting(kept)
        # Kept at once: a night that is interrupted later has not lost it.
        write_json(self.folder / f"{name}.json", {"arm": arm.name, "rounds": [r.measurement.to_json() for r in good]})
        self.progress.trial_finished(
            Trial(
                number=number,
                role="final",
                label=label,
                state="completed",
                engine_args=arm.args,
                reuse_budget=arm.reuse_budget,
                median=summarize([r.measurement for r in good], [r.observation for r in good]).median,
                started_at=started_at,
                time=TrialTime(total_s=self.clock.monotonic_s() - began_s),
            )
        )
        return StartResult(
            rounds=[r.measurement for r in good],
            model_revision=effective.model_revision if effective else None,
            vllm_version=effective.vllm_version if effective else None,
            notes=tuple(f"{name}: a round did not count: {r.measurement.void}" for r in kept if r.measurement.void),
        )


def profile_of(frozen: Frozen, rounds: int) -> Profile:
    """The frozen file as a profile, for the rooms that start engines."""
    return Profile(
        version=1,
        name=frozen.study.name,
        model=frozen.model,
        hardware=frozen.hardware,
        engine=EngineSpec.model_validate(
            {
                "args": frozen.engine_args,
                "env": frozen.engine_env,
                "startup_timeout": f"{frozen.startup_timeout_s:g}s",
            }
        ),
        workload=frozen.workload,
        rounds=rounds,
        space=Space(knobs={"max_num_batched_tokens": [frozen.engine_args.get("max_num_batched_tokens")]}),
        objective=frozen.objective,
        constraints=frozen.constraints,
        regress_metrics=frozen.regress_metrics,
    )


def _load_error(diagnosis: Diagnosis, name: str) -> LoadError:
    return LoadError(diagnosis.code or "http_error", f"{name}: {diagnosis.message}", diagnosis.hint)


@dataclass
class PerArm:
    """A starter of its own for each arm: two files may differ in model or environment."""

    starters: dict[str, Starter]

    async def start(self, arm: Arm, number: int) -> StartResult:
        return await self.starters[arm.name].start(arm, number)
