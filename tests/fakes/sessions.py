"""Engines that are no process: settings with known levels, seeded noise, and faults out of a script.

`FakeEngines.open` is an `OpenSession`. Time is the fake clock's: starts, rounds and stops move it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import exp
from typing import Literal

from tuner.clock import FakeClock
from tuner.domain.experiment import Diagnosis
from tuner.domain.measurement import Breakdown, Client, Latency, Measurement, Memory
from tuner.domain.observation import ClientStats, MemorySample, MemoryTimeline, RequestRecord, RoundObservation
from tuner.domain.setting import CHUNK_KNOB, Scalar, Setting
from tuner.errors import EngineError
from tuner.experiment.design import StartPlan
from tuner.experiment.session import RoundResult, Session, SessionFacts, SwitchRefused

GIB = 2**30
DEVICE = "FAKE-0"
CAPACITY = 80 * GIB
_SHAPE = {"p50": 0.7, "p90": 1.0, "p99": 1.3, "mean": 0.75}
"""A latency's statistics as multiples of its P90."""


@dataclass(frozen=True)
class Level:
    """What a setting truly does to this load."""

    ttft_ms: float
    """P90."""
    itl_ms: float = 20.0
    """P99."""
    throughput: float = 40.0
    failed: int = 0
    groups: Mapping[str, float] = field(default_factory=dict)
    """TTFT P90 by class of request."""


Levels = Callable[[Setting], Level]


def by_chunk(ttft_ms: Mapping[int, float], stock: float, itl_ms: Mapping[int, float] | None = None) -> Levels:
    """TTFT P90 (and ITL P99) by chunk size; `stock` is the TTFT of a setting without one, 0 in `itl_ms` its ITL."""

    def level(setting: Setting) -> Level:
        chunk = setting.chunk or 0
        itl = (itl_ms or {}).get(chunk, 20.0)
        return Level(ttft_ms[chunk] if chunk else stock, itl)

    return level


@dataclass
class Fault:
    """Something that goes wrong; every condition that is given has to hold.

    boot: the engine does not start. refuse: it does not take the setting. apply, warm_up, round: it dies then.
    discard: the round does not count. stop: it cannot be stopped in order.
    """

    kind: Literal["boot", "refuse", "apply", "warm_up", "round", "discard", "stop"]
    code: str = "engine_died"
    setting: str | None = None
    """Label of the setting."""
    chunk_above: int = 0
    """Of the setting; of the start for `boot`."""
    with_args: Mapping[str, Scalar] = field(default_factory=dict)
    """Among the options of the start."""
    start: int | None = None
    nth: int | None = None
    """From 1: which round of this setting within the start, discarded ones counted."""
    times: int | None = None
    """So often in all."""
    message: str = "a fault on demand"
    bound: int | None = None

    @property
    def diagnosis(self) -> Diagnosis:
        return Diagnosis(code=self.code, message=self.message, hint="Do something about it.", bound=self.bound)


@dataclass
class FakeEngines:
    """A machine on which engines with these levels can be started; `calls` is what was asked of them, in order."""

    levels: Levels
    clock: FakeClock
    faults: list[Fault] = field(default_factory=list)
    seed: int = 0
    start_sd: float = 0.0
    """Log-sd of a start's own factor, the same for all of its settings."""
    setting_sd: float = 0.0
    """Log-sd of a setting's factor within a start."""
    cycle_sd: float = 0.0
    """Log-sd of what equal arrivals do to all settings of a cycle."""
    round_sd: float = 0.01
    start_s: float = 240.0
    warm_up_s: float = 1.0
    round_s: float = 2.0
    stop_s: float = 5.0
    stock_chunk: int | None = 8192
    model_revision: str | None = "0" * 40
    requests: int = 20
    calls: list[str] = field(default_factory=list)
    content_keys: list[str] = field(default_factory=list)
    """Of every warm-up and round."""
    running: int = 0

    @asynccontextmanager
    async def open(self, plan: StartPlan, number: int) -> AsyncIterator[Session]:
        assert not self.running, "two engines at once"
        self.calls.append(f"start {number}")
        await self.clock.sleep(self.start_s)
        boot_chunk = plan.engine_args.get(CHUNK_KNOB) or self.stock_chunk
        self._fail("boot", plan, number, chunk=boot_chunk if isinstance(boot_chunk, int) else 0)
        self.running += 1
        try:
            yield FakeSession(self, plan, number)
        finally:
            self.running -= 1
            self.clock.advance(self.stop_s)
            self.calls.append(f"stop {number}")
        self._fail("stop", plan, number)

    def _fail(self, kind: str, plan: StartPlan, number: int, *, chunk: int = 0) -> None:
        fault = self.fault(kind, plan, number, chunk=chunk)
        if fault is not None:
            raise EngineError(fault.diagnosis)

    def fault(
        self, kind: str, plan: StartPlan, start: int, *, label: str = "", chunk: int = 0, nth: int = 0
    ) -> Fault | None:
        """The first fault that applies, used up once."""
        for fault in self.faults:
            if (
                fault.kind == kind
                and fault.times != 0
                and fault.setting in (None, label)
                and fault.start in (None, start)
                and fault.nth in (None, nth)
                and chunk >= fault.chunk_above
                and all(plan.engine_args.get(name) == value for name, value in fault.with_args.items())
            ):
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None

    def factor(self, sd: float, *what: object) -> float:
        """A log-normal factor that is the same for the same `what`."""
        return exp(random.Random("/".join(map(str, (self.seed, *what)))).gauss(0.0, sd)) if sd else 1.0

    def measured(self, setting: Setting, start: int, content_key: str, arrivals_key: str) -> Measurement:
        """A round's numbers: the setting's level times the factors of its start, cycle and round."""
        level = self.levels(setting)

        def noise(metric: str) -> float:
            return (
                self.factor(self.start_sd, "start", start)
                * self.factor(self.setting_sd, "setting", start, setting.key)
                * self.factor(self.cycle_sd, metric, arrivals_key)
                * self.factor(self.round_sd, metric, content_key)
            )

        factor = noise("ttft")
        ttft = level.ttft_ms * factor
        return Measurement(
            ttft_ms=latency(ttft, self.requests),
            cold_ttft_ms=latency(2.5 * ttft, 4),
            itl_ms=latency(level.itl_ms / _SHAPE["p99"] * noise("itl"), self.requests),
            e2e_ms=latency(ttft + 10 * level.itl_ms, self.requests),
            request_throughput=level.throughput / factor,
            output_token_throughput=8 * level.throughput / factor,
            failed_requests=level.failed,
            requests=self.requests,
            prefix_hit_rate=0.9,
            prefill_chunks_per_request=max(1.0, 1000 / (setting.chunk or self.stock_chunk or 8192)),
            preemptions=0,
            kv_cache_usage_peak=0.4,
            kv_cache_tokens=100_000,
            memory=Memory(
                source="simulated",
                peak_bytes={DEVICE: 70 * GIB},
                peak_fraction=0.875,
                breakdown=Breakdown(weights_bytes=16 * GIB, kv_pool_bytes=50 * GIB),
            ),
            client=Client(late_sends_p99_ms=0.3, max_in_flight=4),
            groups={name: latency(p90 * factor, 5) for name, p90 in level.groups.items()},
        )


@dataclass
class FakeSession:
    """One running engine."""

    engines: FakeEngines
    plan: StartPlan
    number: int
    load_s: float = 0.0
    facts: SessionFacts = field(init=False)
    _applied: Setting | None = None
    _driven: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        asked = self.plan.engine_args
        stock_chunk = self.engines.stock_chunk
        self.facts = SessionFacts(
            effective_args={CHUNK_KNOB: stock_chunk, **asked},
            stock_chunk=stock_chunk if self.plan.live or CHUNK_KNOB not in asked else None,
            model_revision=self.engines.model_revision,
            vllm_version="0.32.0",
            command=["vllm", "serve", "m"],
            start_s=self.engines.start_s,
            simulated=True,
        )

    async def apply(self, setting: Setting) -> None:
        if not self.plan.live:
            assert self._applied in (None, setting), "this engine cannot be switched"
        self.engines.calls.append(f"apply {setting.label}")
        refused = self._fault("refuse", setting)
        if refused is not None:
            raise SwitchRefused(refused.message)
        self._die("apply", setting)
        self._applied = setting

    async def warm_up(self, key: str) -> None:
        setting = self._begin("warm up", key)
        await self._load(self.engines.warm_up_s)
        self._die("warm_up", setting)

    async def round(self, content_key: str, arrivals_key: str) -> RoundResult:
        setting = self._begin("round", content_key, arrivals_key)
        self._driven[setting.label] += 1
        began_s = self.engines.clock.monotonic_s()
        await self._load(self.engines.round_s)
        self._die("round", setting)
        discard = self._fault("discard", setting)
        measurement = self.engines.measured(setting, self.number, content_key, arrivals_key)
        observation = observed(measurement, began_s, self.engines.round_s, discard)
        sample = MemorySample(began_s, DEVICE, 70 * GIB)
        timeline = MemoryTimeline("simulated", [sample], {DEVICE: CAPACITY})
        return RoundResult(measurement, observation, timeline, observation.discarded, observation.discard_code)

    def _begin(self, what: str, content_key: str, arrivals_key: str = "") -> Setting:
        assert self._applied is not None, "nothing was applied"
        assert content_key not in self.engines.content_keys, "content that the server has seen"
        self.engines.content_keys.append(content_key)
        self.engines.calls.append(f"{what} {self._applied.label} {arrivals_key}".rstrip())
        return self._applied

    async def _load(self, seconds: float) -> None:
        await self.engines.clock.sleep(seconds)
        self.load_s += seconds

    def _fault(self, kind: str, setting: Setting) -> Fault | None:
        chunk = setting.chunk or self.engines.stock_chunk or 0
        nth = self._driven[setting.label]
        return self.engines.fault(kind, self.plan, self.number, label=setting.label, chunk=chunk, nth=nth)

    def _die(self, kind: str, setting: Setting) -> None:
        fault = self._fault(kind, setting)
        if fault is not None:
            raise EngineError(fault.diagnosis)


def latency(p90: float, n: int) -> Latency:
    """A distribution around a P90."""
    return Latency(**{name: p90 * share for name, share in _SHAPE.items()}, n=n)


def observed(measurement: Measurement, began_s: float, seconds: float, discard: Fault | None) -> RoundObservation:
    """Requests whose TTFTs are spread as the measurement says."""
    n = measurement.requests or 0
    p90 = measurement.ttft_ms.p90 if measurement.ttft_ms else 0.0
    records = []
    for i in range(n):
        sent_s = began_s + seconds * i / (2 * n)
        first_s = sent_s + p90 * (0.4 + 0.67 * (i + 1) / n) / 1000
        records.append(
            RequestRecord(
                index=i,
                phase="measured",
                intended_s=sent_s,
                sent_s=sent_s,
                first_token_s=first_s,
                last_token_s=first_s + 0.1,
                finished_s=first_s + 0.1,
                prompt_tokens=100,
                output_tokens=8,
                cached_tokens=90,
                status=200,
            )
        )
    limited = discard is not None and discard.code == "client_limited"
    return RoundObservation(
        records=records,
        client=ClientStats(0.3, 4, 4, 0.1, limited=limited),
        started_s=began_s,
        measured_from_s=began_s,
        measured_to_s=began_s + seconds,
        discarded=discard.message if discard else "",
        discard_code=discard.code if discard else "",
    )
