"""A server under load: launched by us or running already; settings are applied to it and measured in rounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.measurement import Measurement
from tuner.domain.observation import CounterDelta, MemoryBreakdown, MemoryTimeline, RoundObservation
from tuner.domain.profile import Constraint, Profile
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar, Setting
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, Workload
from tuner.engine.diagnosis import cause
from tuner.engine.launch import EffectiveConfig, LaunchSpec, RunningEngine, launched
from tuner.engine.live import LiveControl, LiveFacts, SwitchRefused
from tuner.engine.ranks import gpus_of_node
from tuner.errors import EngineError
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import StartPlan
from tuner.experiment.events import Events
from tuner.experiment.plugin_log import counted_between, last_counters
from tuner.load.drive import drive
from tuner.load.plan import RoundPlan
from tuner.load.planner import Planner
from tuner.load.probe import ServerFacts, probe
from tuner.load.target import Target
from tuner.measure import measure_round
from tuner.scheduler.messages import LIVE_VALUES
from tuner.sim.tiny_model import resolve_model
from tuner.telemetry import MemorySource, Sampler, Unavailable, describe_devices, memory_source, metrics_span

__all__ = [
    "OpenSession",
    "RoundResult",
    "ServerSession",
    "Session",
    "SessionFacts",
    "SwitchRefused",
    "engine_opener",
    "engine_spec",
    "open_server",
]

STALL_TIMEOUT_S = 60.0
LEASE_S = 900.0
"""How long a live setting lasts without a word from us: longer than a round, and a bound after a kill."""
_MEMORY_SLACK_BYTES = 512 << 20
"""Other tenants' use varies; an engine that still holds its pool is far above this."""


@dataclass(frozen=True)
class RoundResult:
    """One round: the numbers, what they were made of, and why it does not count ('' when it does)."""

    measurement: Measurement
    observation: RoundObservation
    timeline: MemoryTimeline
    discarded: str = ""
    code: str = ""


@dataclass(frozen=True)
class SessionFacts:
    """What is known of the server once it is ready; goes into `start.json`."""

    effective_args: dict[str, Scalar] | None = None
    stock_chunk: int | None = None
    model_revision: str | None = None
    vllm_version: str | None = None
    command: list[str] = field(default_factory=list)
    start_s: float = 0.0
    simulated: bool = False
    warnings: list[str] = field(default_factory=list)


class Session(Protocol):
    """A server on which settings are measured, one round after another."""

    facts: SessionFacts
    load_s: float
    """Seconds under load so far."""

    async def apply(self, setting: Setting) -> None:
        """Make the idle server run `setting`, with nothing cached.

        SwitchRefused when it does not take the setting; EngineError when it no longer answers.
        """
        ...

    async def warm_up(self, key: str) -> None:
        """A discarded load at full concurrency and the longest prompts, on content that `key` makes new.

        EngineError when the engine died or stalled of it.
        """
        ...

    async def round(self, content_key: str, arrivals_key: str) -> RoundResult:
        """One round on content that `content_key` makes new; equal arrivals keys give equal arrivals and lengths.

        EngineError when the engine died of it.
        """
        ...


OpenSession = Callable[[StartPlan, int], AbstractAsyncContextManager[Session]]
"""Opens the session of start number n; EngineError and LoadError say why there is none."""


@dataclass
class ServerSession:
    """The session over a real connection."""

    target: Target
    server: ServerFacts
    planner: Planner
    sampler: Sampler
    constraints: tuple[Constraint, ...]
    clock: Clock
    workload: Workload
    events: Events
    engine: RunningEngine | None = None
    block_size: int | None = None
    boot_budget: ReuseBudget | None = None
    stock_args: Mapping[str, Scalar] = field(default_factory=dict)
    """`engine.args` of the profile: what a live setting starts from."""
    live: LiveControl | None = None
    live_facts: LiveFacts | None = None
    load_s: float = 0.0
    facts: SessionFacts = field(init=False)
    _applied: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        effective = self.engine.effective if self.engine else EffectiveConfig()
        boot_chunk = effective.args.get(CHUNK_KNOB)
        untold = self.engine is not None and CHUNK_KNOB not in self.engine.asked
        known = boot_chunk if untold and isinstance(boot_chunk, int) else None
        self.facts = SessionFacts(
            effective_args=dict(effective.args) if self.engine else None,
            stock_chunk=known or (self.live_facts.stock_chunk if self.live_facts else None),
            model_revision=effective.model_revision,
            vllm_version=effective.vllm_version,
            command=self.engine.command if self.engine else [],
            start_s=self.engine.start_s if self.engine else 0.0,
            simulated=self.server.simulated,
            warnings=[w for w in (*self.planner.labels, effective.warning) if w],
        )

    async def apply(self, setting: Setting) -> None:
        if self.live is None:
            if self.engine is not None:
                await self.engine.reset_prefix_cache()
            return
        values = self._values(setting)
        await self.live.apply(values, LEASE_S)
        self._applied = values

    async def warm_up(self, key: str) -> None:
        # Kernels may be compiled in it, which takes a large model minutes, as its start did.
        stall_timeout_s = max(STALL_TIMEOUT_S, self.facts.start_s)
        observation = await self._drive(self.planner.warm_up(key), stall_timeout_s)
        self._raise_if_dead()
        if self.engine is not None and observation.discard_code == "engine_stalled":
            raise EngineError(self.engine.failed(cause("engine_stalled", observation.discarded)))

    async def round(self, content_key: str, arrivals_key: str) -> RoundResult:
        plan = self.planner.plan(content_key, arrivals_key)
        counted = self._logged_counters()
        began_s = self.clock.monotonic_s()
        async with metrics_span(self.target.base, self.clock, headers=self.target.headers) as span:
            observation = await self._drive(plan)
        ended_s = self.clock.monotonic_s()
        self._raise_if_dead()
        discarded, code = observation.discarded, observation.discard_code
        if self.live is not None and not discarded:
            discarded, code = await self._proof(self.live, span.delta)
        elif not span.delta.plugin:
            span.delta.plugin = counted_between(counted, self._logged_counters())
        timeline = self.sampler.timeline(began_s, ended_s)
        measurement = measure_round(
            observation,
            span.delta,
            timeline,
            self.engine.effective.breakdown if self.engine else MemoryBreakdown(),
            self.constraints,
            block_size=self.block_size,
            chunk_tokens=self._chunk_tokens(),
            shared_prefix_tokens=shared_prefix_tokens(self.workload),
            kv_cache_tokens=self.engine.effective.kv_cache_tokens if self.engine else None,
        )
        return RoundResult(measurement, observation, timeline, discarded, code)

    async def _proof(self, live: LiveControl, delta: CounterDelta) -> tuple[str, str]:
        """What the scheduler reports it ran: its counters go into `delta`; a difference discards the round."""
        report = await live.report()
        delta.plugin = report.counters
        differs = report.mismatch(self._applied or {})
        return (differs, "not_as_applied") if differs else ("", "")

    def _values(self, setting: Setting) -> dict[str, Any]:
        """Every live value of this setting: its knobs over the profile's options over those of the start."""
        boot = dict(self.live_facts.boot) if self.live_facts else {}
        if CHUNK_KNOB not in self.stock_args and self.facts.stock_chunk is not None:
            boot[CHUNK_KNOB] = self.facts.stock_chunk
        given = {**self.stock_args, **setting.knobs}
        values = {name: given.get(name, boot.get(name)) for name in LIVE_VALUES}
        return {**values, "reuse_budget": (setting.reuse_budget or ReuseBudget()).to_json()}

    async def _drive(self, plan: RoundPlan, stall_timeout_s: float = STALL_TIMEOUT_S) -> RoundObservation:
        began_s = self.clock.monotonic_s()
        try:
            return await drive(
                self.target,
                plan,
                self.clock,
                # Shorter than a request may take, so that a stall is told from slow requests that time out.
                stall_timeout_s=min(stall_timeout_s, 0.8 * self.target.request_timeout_s),
                died=lambda: self.engine is not None and self.engine.exited() is not None,
                on_progress=self.events.round_progress,
            )
        finally:
            self.load_s += self.clock.monotonic_s() - began_s

    def _logged_counters(self) -> Any:
        """The plug-in's counters of an engine that was started with a reuse budget, from its log."""
        if self.engine is None or self.boot_budget is None or self.live is not None:
            return None
        return last_counters(self.engine.log_lines())

    def _chunk_tokens(self) -> int | None:
        ran = self._applied if self._applied is not None else (self.facts.effective_args or {})
        value = ran.get(CHUNK_KNOB)
        return value if isinstance(value, int) else None

    def _raise_if_dead(self) -> None:
        death = self.engine.exited() if self.engine is not None else None
        if death is not None:
            raise EngineError(death)


def engine_spec(
    profile: Profile, choice: EngineChoice, plan: StartPlan, log_path: Path, record_dir: Path
) -> LaunchSpec:
    """What the engine room launches for this start."""
    return LaunchSpec(
        launcher=choice.launcher,
        kind=choice.kind,
        model=profile.model if choice.simulated else resolve_model(profile.model),
        args=plan.engine_args,
        env={**choice.env, **profile.engine.env},
        log_path=log_path,
        startup_timeout_s=profile.engine.startup_timeout,
        record_dir=record_dir,
        reuse_budget=plan.reuse_budget,
        budget_in_environment=plan.purpose == "search",
        live=plan.live,
    )


def engine_opener(
    profile: Profile,
    choice: EngineChoice,
    *,
    seed: int,
    log_path: Callable[[int], Path],
    record_dir: Path,
    clock: Clock = SYSTEM_CLOCK,
    events: Events,
) -> OpenSession:
    """Launches an engine for each start and stops it in order whatever happens."""

    @asynccontextmanager
    async def open_session(plan: StartPlan, number: int) -> AsyncIterator[Session]:
        spec = engine_spec(profile, choice, plan, log_path(number), record_dir)
        events.stage("starting the engine")
        async with launched(
            spec, clock, memory_is_back=_memory_is_back(profile, choice, plan), on_wait=events.stage
        ) as engine:
            target = Target(
                base_url=engine.base_url,
                model=engine.model_id,
                api=profile.workload.api,
                request_timeout_s=profile.workload.request_timeout,
            )
            source = memory_source(
                choice.kind,
                engine.base_url,
                engine.process_ids,
                {**os.environ, **profile.engine.env},
                gpus_of_node(plan.engine_args),
            )
            live_facts = await engine.live.facts() if engine.live is not None else None
            async with _connected(target, profile.workload, tuple(profile.constraints), seed, source, clock) as made:
                server, planner, sampler = made
                yield ServerSession(
                    target=target,
                    server=server,
                    planner=planner,
                    sampler=sampler,
                    constraints=tuple(profile.constraints),
                    clock=clock,
                    workload=profile.workload,
                    events=events,
                    engine=engine,
                    block_size=engine.effective.block_size or profile.engine.block_size,
                    boot_budget=plan.reuse_budget,
                    stock_args=profile.engine.args,
                    live=engine.live,
                    live_facts=live_facts,
                )
            events.stage("stopping the engine")

    return open_session


@asynccontextmanager
async def open_server(
    target: Target,
    workload: Workload,
    *,
    constraints: tuple[Constraint, ...] = (),
    seed: int = 0,
    block_size: int | None = None,
    clock: Clock = SYSTEM_CLOCK,
    events: Events,
) -> AsyncIterator[ServerSession]:
    """A server that runs already: probed, never stopped. LoadError says why it cannot be used."""
    if target.loopback:
        source: MemorySource = memory_source("vllm", target.base_url, None)
    else:
        source = Unavailable("the server is on another machine; NVML here does not see its devices")
    async with _connected(target, workload, constraints, seed, source, clock) as (server, planner, sampler):
        yield ServerSession(
            target=target,
            server=server,
            planner=planner,
            sampler=sampler,
            constraints=constraints,
            clock=clock,
            workload=workload,
            events=events,
            block_size=block_size,
        )


@asynccontextmanager
async def _connected(
    target: Target,
    workload: Workload,
    constraints: tuple[Constraint, ...],
    seed: int,
    source: MemorySource,
    clock: Clock,
) -> AsyncIterator[tuple[ServerFacts, Planner, Sampler]]:
    server = await probe(target, ignore_eos=workload.ignore_eos)
    planner = await Planner.open(target, workload, server, seed=seed, base_dir=Path())
    sampler = Sampler(source, clock=clock)
    await asyncio.to_thread(sampler.start)
    try:
        yield server, planner, sampler
    finally:
        await asyncio.to_thread(sampler.stop)


def shared_prefix_tokens(workload: Workload) -> int | None:
    """The shortest prefix that requests of this load share; None where it has none."""
    if isinstance(workload, SharedPrefixWorkload):
        return workload.system_prompt_tokens[0] or None
    if isinstance(workload, MixedWorkload):
        lengths = [c.system_prompt_tokens[0] for c in workload.classes if c.system_prompt_tokens[0]]
        return min(lengths, default=None)
    return None


def _memory_is_back(profile: Profile, choice: EngineChoice, plan: StartPlan) -> Callable[[], bool] | None:
    """Whether the devices are as free as before this start; None where NVML cannot say."""
    if choice.simulated:
        return None
    env, count = {**os.environ, **profile.engine.env}, gpus_of_node(plan.engine_args)
    before = {device.uuid: device.used_bytes for device in describe_devices(env, count).devices}
    if not before:
        return None

    def is_back() -> bool:
        now = describe_devices(env, count).devices
        return all(device.used_bytes <= before.get(device.uuid, 0) + _MEMORY_SLACK_BYTES for device in now)

    return is_back
