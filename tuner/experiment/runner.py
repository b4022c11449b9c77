"""The one runner: starts engines, measures settings on them in rounds, keeps everything on disk at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tuner.clock import Clock
from tuner.domain.experiment import Diagnosis, Results, Round, Start, StartState, StartTime
from tuner.domain.measurement import Measurement
from tuner.domain.observation import ClientStats, MemoryTimeline, RoundObservation
from tuner.engine.causes import CAUSES
from tuner.engine.policy import policy
from tuner.errors import EngineError, LoadError
from tuner.experiment.design import SWITCH_REFUSED, Design, StartPlan, Step
from tuner.experiment.events import Events
from tuner.experiment.session import OpenSession, RoundResult, Session, SwitchRefused
from tuner.experiment.store import Store

ATTEMPTS = 3
"""Times that one step is driven while its rounds are discarded (warm cache, failures, slow client)."""

PAUSES_S = (2.0, 8.0)
"""Waits before a round is driven again because the client was the limit: what was in its way may pass."""

HOPELESS = frozenset({"auth", "engine_stalled", "engine_died"})
"""Codes of discarded rounds that another round on the same engine would only meet again."""

REPEATS_ITSELF = frozenset({SWITCH_REFUSED, "answers_differ", "prompts_differ", "queue_grows"})
"""Codes of discarded rounds that another round on this setting would only show again."""


async def run(design: Design, store: Store, open_session: OpenSession, clock: Clock, events: Events) -> Results:
    """Measure what the design asks for, until it is done. What is on disk already counts.

    StudyStopped when the design cannot go on. Cancelled, the start under way is kept as `interrupted`.
    """
    watch = Watch(clock, store.results())
    while (plan := design.next_start(watch.now())) is not None:
        await measure_start(plan, design, watch, store, open_session, clock, events)
    return watch.now()


async def measure_start(
    plan: StartPlan,
    design: Design,
    watch: Watch,
    store: Store,
    open_session: OpenSession,
    clock: Clock,
    events: Events,
) -> Start:
    """One start with all the rounds that the design asks for on it. Failures are its state, not exceptions."""
    return await _StartUnderWay(plan, design, watch, store, clock, events).measure(open_session)


@dataclass
class Watch:
    """The results so far, with `elapsed_s` up to date whenever they are asked for."""

    clock: Clock
    results: Results
    earlier_s: float = field(init=False)
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.earlier_s = self.results.elapsed_s
        self.began_s = self.clock.monotonic_s()

    def now(self) -> Results:
        self.results.elapsed_s = self.earlier_s + self.clock.monotonic_s() - self.began_s
        return self.results


class _StartUnderWay:
    """One start, from launch to stop."""

    def __init__(
        self, plan: StartPlan, design: Design, watch: Watch, store: Store, clock: Clock, events: Events
    ) -> None:
        self._design = design
        self._watch = watch
        self._store = store
        self._clock = clock
        self._events = events
        self._plan = plan
        self._began_s = clock.monotonic_s()
        self._stop_from_s: float | None = None
        self._session: Session | None = None
        self._step: Step | None = None
        self._warm: set[int | None] = set()
        self._warm_ups = 0
        self.start = Start(
            number=store.next_start_number(),
            purpose=plan.purpose,
            label=plan.label,
            state="interrupted",
            engine_args=plan.engine_args,
            reuse_budget=plan.reuse_budget,
            live=plan.live,
            settings=[n.id for n in plan.settings],
            defined={str(n.id): n.setting for n in plan.settings},
            started_at=clock.now().isoformat(timespec="seconds"),
        )

    async def measure(self, open_session: OpenSession) -> Start:
        """Measure the start. Failures are its state, not exceptions; a cancellation is kept and passed on."""
        self._watch.results.starts.append(self.start)
        self._keep()
        self._events.start_began(self.start.number, self._plan)
        try:
            async with open_session(self._plan, self.start.number) as session:
                self._ready(session)
                try:
                    state, diagnosis = await self._rounds(session)
                finally:
                    self._stop_from_s = self._clock.monotonic_s()
                if state == "completed":
                    self._step = None
            self._end(state, diagnosis)
        except EngineError as error:
            self._end(self._failed_as(error.diagnosis), error.diagnosis)
        except LoadError as error:
            diagnosis = Diagnosis(code=error.code, message=error.message, hint=error.hint)
            self._end(self._failed_as(diagnosis), diagnosis)
        except asyncio.CancelledError:
            self._end("interrupted", None)
            raise
        return self.start

    def _ready(self, session: Session) -> None:
        self._session = session
        facts = session.facts
        self._change(
            effective_args=facts.effective_args,
            stock_chunk=facts.stock_chunk,
            model_revision=facts.model_revision,
            vllm_version=facts.vllm_version,
            command=facts.command,
            start_s=facts.start_s,
            simulated=facts.simulated,
            warnings=facts.warnings,
        )
        self._events.start_ready(self.start)

    async def _rounds(self, session: Session) -> tuple[StartState, Diagnosis | None]:
        """Every step that the design asks for; the reason when it asks again for one that was given up."""
        given_up: dict[tuple[object, int], RoundResult] = {}
        while (step := self._design.next_step(self._watch.now(), self.start)) is not None:
            self._step = step
            last = given_up.get((step.named.id, step.cycle))
            if last is not None:
                return "load_failed", _why(last)
            self._define(step)
            failed = await self._measure_step(session, step)
            if failed is not None:
                if failed.code in HOPELESS:
                    diagnosis = _why(failed)
                    return self._failed_as(diagnosis), diagnosis
                given_up[step.named.id, step.cycle] = failed
        return "completed", None

    def _define(self, step: Step) -> None:
        name = step.named.id
        if name not in self.start.settings:
            defined = {**self.start.defined, str(name): step.named.setting}
            self._change(settings=[*self.start.settings, name], defined=defined)

    async def _measure_step(self, session: Session, step: Step) -> RoundResult | None:
        """Attempts until a round counts; the last result when none did."""
        result: RoundResult | None = None
        limited = 0
        for attempt in range(1, ATTEMPTS + 1):
            if result is not None and result.code == "client_limited":
                await self._pause(PAUSES_S[min(limited, len(PAUSES_S) - 1)])
                limited += 1
            self._events.round_began(self.start, step, attempt)
            try:
                result = await self._one_round(session, step)
            except SwitchRefused as refused:
                result = _refused(str(refused))
                self._row(step, result, 0.0)
            if not result.discarded:
                return None
            if result.code in HOPELESS | REPEATS_ITSELF:
                break
        return result

    async def _one_round(self, session: Session, step: Step) -> RoundResult:
        setting, start = step.named.setting, self.start.number
        await session.apply(setting)
        if setting.chunk not in self._warm:
            # The first steps of a new shape compile or are tuned; of the start's first load, everything is.
            self._events.stage("warming up")
            self._warm_ups += 1
            await session.warm_up(f"start-{start}/warm-up-{self._warm_ups}")
            self._warm.add(setting.chunk)
            await session.apply(setting)
        before_s, number = session.load_s, self._next_round
        result = await session.round(f"start-{start}/round-{number}", f"cycle-{step.cycle}")
        self._store.write_round_data(start, number, result.observation, result.timeline)
        self._row(step, result, session.load_s - before_s)
        return result

    @property
    def _next_round(self) -> int:
        return 1 + sum(r.start == self.start.number for r in self._watch.results.rounds)

    def _row(self, step: Step, result: RoundResult, load_s: float) -> None:
        row = Round(
            start=self.start.number,
            round=self._next_round,
            cycle=step.cycle,
            position=step.position,
            setting=step.named.id,
            state="discarded" if result.discarded else "kept",
            reason=result.discarded or None,
            code=result.code or None,
            load_s=load_s,
            measurement=result.measurement,
        )
        self._store.append_round(row)
        self._watch.results.rounds.append(row)
        self._change()  # The time so far, in case that the run is killed.
        self._events.round_ended(row, step.named)

    async def _pause(self, seconds: float) -> None:
        self._events.stage(f"waiting {seconds:g} s: the load generator could not keep up")
        await self._clock.sleep(seconds)

    def _failed_as(self, diagnosis: Diagnosis) -> StartState:
        """A failure before the engine was ready may be the options' fault; one under load is told with its setting."""
        if self._session is None and policy(diagnosis.code) == "setting":
            return "infeasible"
        return "load_failed" if policy(diagnosis.code) == "load" else "engine_failed"

    def _end(self, state: StartState, diagnosis: Diagnosis | None) -> None:
        step = self._step if state not in ("completed", "interrupted") else None
        self._change(
            state=state,
            cause=(diagnosis.code or None) if diagnosis else None,
            message=diagnosis.message if diagnosis else None,
            hint=(diagnosis.hint or None) if diagnosis else None,
            bound=diagnosis.bound if diagnosis else None,
            failed_setting=step.named.id if step else None,
        )
        self._events.start_ended(self.start)

    def _change(self, **changes: Any) -> None:
        self.start = self.start.model_copy(update={**changes, "time": self._time()})
        self._watch.results.starts[-1] = self.start
        self._keep()

    def _keep(self) -> None:
        self._store.write_start(self.start)

    def _time(self) -> StartTime:
        """Where its seconds went until now: without a session, all of them into the engine's start."""
        now_s = self._clock.monotonic_s()
        total_s = now_s - self._began_s
        if self._session is None:
            return StartTime(total_s=total_s, engine_start_s=total_s)
        return StartTime(
            total_s=total_s,
            engine_start_s=self._session.facts.start_s,
            load_s=self._session.load_s,
            stop_s=0.0 if self._stop_from_s is None else now_s - self._stop_from_s,
        )


def _why(discarded: RoundResult) -> Diagnosis:
    code = discarded.code or "http_error"
    hint = CAUSES[code].hint if code in CAUSES else ""
    return Diagnosis(code=code, message=discarded.discarded, hint=hint)


def _refused(reason: str) -> RoundResult:
    nothing = RoundObservation([], ClientStats(None, 0, None, None, limited=False), 0.0, 0.0, 0.0)
    return RoundResult(Measurement(), nothing, MemoryTimeline("unavailable", [], {}, reason), reason, SWITCH_REFUSED)
