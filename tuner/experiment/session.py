"""A server under load: launched by us or running already, measured round by round."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar
from tuner.domain.measurement import Measurement
from tuner.domain.observation import MemoryBreakdown, MemoryTimeline, RoundObservation
from tuner.domain.profile import Constraint, Profile
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, Workload
from tuner.engine.diagnosis import cause
from tuner.engine.launch import EffectiveConfig, LaunchSpec, RunningEngine, launched
from tuner.errors import EngineError
from tuner.load.drive import drive
from tuner.load.plan import RoundPlan
from tuner.load.planner import Planner
from tuner.load.probe import ServerFacts, probe
from tuner.load.target import Target
from tuner.measure import measure_round
from tuner.scheduler.decisions import Counters
from tuner.sim.tiny_model import resolve_model
from tuner.telemetry import MemorySource, Sampler, Unavailable, describe_devices, memory_source, metrics_span
from tuner.experiment.choice import EngineChoice
from tuner.trial.plugin_log import counted_between, last_counters

STALL_TIMEOUT_S = 60.0
_MEMORY_SLACK_BYTES = 512 << 20
"""Other tenants breathe; an engine that still holds its pool is far above this."""


@dataclass(frozen=True)
class SessionConfig:
    """One engine to launch and the load for it."""

    choice: EngineChoice
    model: str
    args: dict[str, Scalar]
    reuse_budget: ReuseBudget | None
    env: dict[str, str]
    startup_timeout_s: float
    workload: Workload
    constraints: tuple[Constraint, ...]
    seed: int
    log_path: Path
    record_dir: Path
    block_size: int | None = None
    """As far as known before the start; the engine's own word wins."""

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        choice: EngineChoice,
        *,
        args: dict[str, Scalar],
        reuse_budget: ReuseBudget | None,
        seed: int,
        log_path: Path,
        record_dir: Path,
    ) -> SessionConfig:
        return cls(
            choice=choice,
            model=profile.model if choice.simulated else resolve_model(profile.model),
            args=args,
            reuse_budget=reuse_budget,
            env=profile.engine.env,
            startup_timeout_s=profile.engine.startup_timeout,
            workload=profile.workload,
            constraints=tuple(profile.constraints),
            seed=seed,
            log_path=log_path,
            record_dir=record_dir,
        )

    def launch_spec(self) -> LaunchSpec:
        """What the engine room starts."""
        return LaunchSpec(
            launcher=self.choice.launcher,
            kind=self.choice.kind,
            model=self.model,
            args=self.args,
            env={**self.choice.env, **self.env},
            log_path=self.log_path,
            startup_timeout_s=self.startup_timeout_s,
            record_dir=self.record_dir,
            reuse_budget=self.reuse_budget,
        )


@dataclass(frozen=True)
class RoundResult:
    """One round: the numbers, and what they were made of."""

    measurement: Measurement
    observation: RoundObservation
    timeline: MemoryTimeline


class Session(Protocol):
    """A server that can be measured, one round after another."""

    facts: ServerFacts
    effective: EffectiveConfig | None
    command: list[str]

    async def round(self, key: str) -> RoundResult:
        """Drive one round on content that `key` makes new. EngineError when the engine died of it."""
        ...


@dataclass
class LiveSession:
    """The session over a real connection; `load_s` adds up the time spent under load."""

    target: Target
    facts: ServerFacts
    planner: Planner
    sampler: Sampler
    constraints: tuple[Constraint, ...]
    clock: Clock
    engine: RunningEngine | None = None
    block_size: int | None = None
    shared_prefix_tokens: int | None = None
    reuse_budget: ReuseBudget | None = None
    on_progress: Callable[[int, int], None] | None = None
    load_s: float = 0.0
    left_s: float | None = None
    """When it was left, on the clock: what comes after is the engine's stop."""
    effective: EffectiveConfig | None = field(init=False)
    command: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.effective = self.engine.effective if self.engine else None
        self.command = self.engine.command if self.engine else []

    async def warm_up(self) -> None:
        """The discarded wave at full concurrency and longest prompt; it is the OOM probe too.

        EngineError when the engine died or stalled of it.
        """
        observation = await self._drive(self.planner.warm_up("warm-up"))
        await self._raise_if_dead()
        if self.engine is not None and observation.discard_code == "engine_stalled":
            raise EngineError(self.engine.failed(cause("engine_stalled", observation.void)))

    async def _drive(self, plan: RoundPlan) -> RoundObservation:
        began_s = self.clock.monotonic_s()
        try:
            return await drive(
                self.target,
                plan,
                self.clock,
                # Shorter than a request may take, so that a stall is told from slow requests that time out.
                stall_timeout_s=min(STALL_TIMEOUT_S, 0.8 * self.target.request_timeout_s),
                died=self._died,
                on_progress=self.on_progress,
            )
        finally:
            self.load_s += self.clock.monotonic_s() - began_s

    async def round(self, key: str) -> RoundResult:
        plan = self.planner.plan(key)
        counted = self._plugin_counters()
        began_s = self.clock.monotonic_s()
        async with metrics_span(self.target.base, self.clock, headers=self.target.headers) as span:
            observation = await self._drive(plan)
        ended_s = self.clock.monotonic_s()
        await self._raise_if_dead()
        if self.engine is not None and not span.delta.plugin:
            span.delta.plugin = counted_between(counted, self._plugin_counters())
        timeline = self.sampler.timeline(began_s, ended_s)
        breakdown = self.effective.breakdown if self.effective else MemoryBreakdown()
        measurement = measure_round(
            observation,
            span.delta,
            timeline,
            breakdown,
            self.constraints,
            block_size=self.block_size,
            chunk_tokens=self._chunk_tokens(),
            shared_prefix_tokens=self.shared_prefix_tokens,
        )
        return RoundResult(measurement, observation, timeline)

    def _plugin_counters(self) -> Counters | None:
        has_plugin = self.engine is not None and self.reuse_budget is not None
        return last_counters(self.engine.log_lines()) if self.engine is not None and has_plugin else None

    def _died(self) -> bool:
        return self.engine is not None and self.engine.exited() is not None

    def _chunk_tokens(self) -> int | None:
        value = self.effective.args.get(CHUNK_KNOB) if self.effective else None
        return value if isinstance(value, int) else None

    async def _raise_if_dead(self) -> None:
        if self.engine is None:
            return
        diagnosis = self.engine.exited()
        if diagnosis is not None:
            raise EngineError(diagnosis)


@asynccontextmanager
async def engine_session(
    config: SessionConfig,
    clock: Clock = SYSTEM_CLOCK,
    *,
    on_stage: Callable[[str], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_open: Callable[[LiveSession], None] | None = None,
) -> AsyncIterator[LiveSession]:
    """Launch the engine, probe it, warm it up; stop it in order whatever happens.

    EngineError and LoadError say why there is no session. `on_open` gets the session before its warm-up, so that
    its times are known where the warm-up fails.
    """
    say = on_stage or (lambda _: None)
    say("starting the engine")
    async with launched(config.launch_spec(), clock, memory_is_back=_memory_is_back(config)) as engine:
        target = Target(
            base_url=engine.base_url,
            model=engine.model_id,
            api=config.workload.api,
            request_timeout_s=config.workload.request_timeout,
        )
        environment = {**os.environ, **config.env}
        source = memory_source(config.choice.kind, engine.base_url, engine.process_ids, environment)
        block_size = engine.effective.block_size or config.block_size
        async with _open(
            target, config.workload, config.constraints, config.seed, source, clock, engine, block_size, on_progress
        ) as session:
            if on_open is not None:
                on_open(session)
            session.reuse_budget = config.reuse_budget
            try:
                say("warming up")
                await session.warm_up()
                yield session
            finally:
                session.left_s = clock.monotonic_s()


@asynccontextmanager
async def remote_session(
    target: Target,
    workload: Workload,
    *,
    constraints: tuple[Constraint, ...] = (),
    seed: int = 0,
    clock: Clock = SYSTEM_CLOCK,
    block_size: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> AsyncIterator[LiveSession]:
    """A server that runs already: probed and warmed up, never stopped. LoadError says why it cannot be used."""
    if target.loopback:
        source: MemorySource = memory_source("vllm", target.base_url, None)
    else:
        source = Unavailable("the server is on another machine; NVML here does not speak of it")
    async with _open(target, workload, constraints, seed, source, clock, None, block_size, on_progress) as session:
        await session.warm_up()
        yield session


def shared_prefix_tokens(workload: Workload) -> int | None:
    """The shortest prefix that requests of this load share; None where it has none."""
    if isinstance(workload, SharedPrefixWorkload):
        return workload.system_prompt_tokens[0] or None
    if isinstance(workload, MixedWorkload):
        lengths = [c.system_prompt_tokens[0] for c in workload.classes if c.system_prompt_tokens[0]]
        return min(lengths, default=None)
    return None


def _memory_is_back(config: SessionConfig) -> Callable[[], bool] | None:
    """Whether the devices are as free as before this start; None where NVML cannot say."""
    if config.choice.simulated:
        return None
    env = {**os.environ, **config.env}
    before = {device.uuid: device.used_bytes for device in describe_devices(env).devices}
    if not before:
        return None

    def is_back() -> bool:
        now = describe_devices(env).devices
        return all(device.used_bytes <= before.get(device.uuid, 0) + _MEMORY_SLACK_BYTES for device in now)

    return is_back


@asynccontextmanager
async def _open(
    target: Target,
    workload: Workload,
    constraints: tuple[Constraint, ...],
    seed: int,
    source: MemorySource,
    clock: Clock,
    engine: RunningEngine | None,
    block_size: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> AsyncIterator[LiveSession]:
    facts = await probe(target)
    planner = await Planner.open(target, workload, facts, seed=seed, base_dir=Path())
    sampler = Sampler(source, clock=clock)
    await asyncio.to_thread(sampler.start)
    try:
        yield LiveSession(
            target=target,
            facts=facts,
            planner=planner,
            sampler=sampler,
            constraints=constraints,
            clock=clock,
            engine=engine,
            block_size=block_size,
            shared_prefix_tokens=shared_prefix_tokens(workload),
            on_progress=on_progress,
        )
    finally:
        await asyncio.to_thread(sampler.stop)
