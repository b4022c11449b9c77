"""An experiment without engines: what the runner does, on levels and noise of the test's own making."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tuner.domain.experiment import STOCK_ID, Results, Round, SettingId, Start, StartTime
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.profile import Constraint, Objective
from tuner.domain.setting import CHUNK_KNOB, Setting
from tuner.experiment.design import Design, StartPlan
from tuner.study.problem import Group, Problem


def chunk(size: int, **knobs: int) -> Setting:
    return Setting(knobs={CHUNK_KNOB: size, **knobs})


def problem(*settings: Setting, limits: tuple[str, ...] = (), **more: object) -> Problem:
    """TTFT P90 to be low, stock's chunk 8192."""
    values: dict[str, object] = {
        "base_args": {"max_model_len": 8192},
        "groups": (Group({}, settings),),
        "objective": Objective(minimize=["ttft_ms.p90"]),
        "constraints": tuple(Constraint.parse(text) for text in limits),
        "default_chunk": 8192,
        "refine": False,
        **more,
    }
    return Problem(**values)  # type: ignore[arg-type]


class Numbers:
    """A registry that counts; `proposals` are handed out in their order."""

    def __init__(self, *proposals: Setting) -> None:
        self.settings: list[Setting] = []
        self._proposals = list(proposals)

    def id_of(self, setting: Setting) -> SettingId:
        if setting.is_stock:
            return STOCK_ID
        if setting not in self.settings:
            self.settings.append(setting)
        return self.settings.index(setting)

    def propose(self, group: Group, count: int) -> list[Setting]:
        return [s for s in self._proposals if s not in self.settings][:count]


@dataclass
class Levels:
    """True levels of a setting; times in ms."""

    p90: float
    p99: float = 0.0
    itl: float = 20.0
    failed: int = 0
    answered: float | None = None
    """Share of the requested output tokens that is given."""
    peak_fraction: float | None = None


@dataclass
class Engines:
    """Where a design is measured. Latencies get the noise of starts, of settings within them, of cycles and rounds."""

    levels: Callable[[Setting], Levels]
    round_sd: float = 0.02
    cycle_sd: float = 0.05
    start_sd: float = 0.03
    setting_sd: float = 0.01
    seed: int = 0
    stock_chunk: int | None = 8192
    refuses: Callable[[StartPlan], str | None] = lambda plan: None
    """The cause with which a start cannot boot."""
    crashes: Callable[[Setting, Start], str | None] = lambda setting, start: None
    """The cause with which the engine dies under a setting."""
    discards: Callable[[Setting], str | None] = lambda setting: None
    """The code with which every round of a setting is discarded."""
    literal: float = 1.0
    """Factor on the latencies of the literal start."""
    kill_after: int | None = None
    """Rounds after which the run is killed, once."""
    start_s: float = 240.0
    round_s: float = 5.0
    results: Results = field(default_factory=Results)
    plans: list[StartPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self._cycles: dict[int, float] = {}

    def run(self, design: Design) -> Results:
        """Until the design is done, or the run is killed."""
        while (plan := design.next_start(self.results)) is not None:
            self.plans.append(plan)
            assert len(self.plans) < 60, "the design makes start after start"
            if not self._start(plan, design):
                break
        return self.results

    def _start(self, plan: StartPlan, design: Design) -> bool:
        start = Start(
            number=len(self.results.starts) + 1,
            purpose=plan.purpose,
            label=plan.label,
            state="interrupted",
            engine_args=plan.engine_args,
            live=plan.live,
            settings=[n.id for n in plan.settings],
            defined={str(n.id): n.setting for n in plan.settings},
        )
        self.results.starts.append(start)
        self.results.elapsed_s += self.start_s
        cause = self.refuses(plan)
        if cause is not None:
            state = "engine_failed" if cause in ("unknown", "engine_died", "gated_model") else "infeasible"
            return self._end(start, state=state, cause=cause, message=f"it says {cause}")
        asked = plan.engine_args.get(CHUNK_KNOB, self.stock_chunk)
        ready = {"effective_args": {**plan.engine_args, CHUNK_KNOB: asked}, "stock_chunk": self.stock_chunk}
        start = start.model_copy(update={**ready, "start_s": self.start_s})
        self.results.starts[-1] = start
        return self._rounds(start, design)

    def _rounds(self, start: Start, design: Design) -> bool:
        speed = self.random.normal(0, self.start_sd)
        own: dict[SettingId, float] = {}
        while (step := design.next_step(self.results, start)) is not None:
            if self.kill_after is not None and len(self.results.rounds) >= self.kill_after:
                self.kill_after = None
                return False
            name, setting = step.named.id, step.named.setting
            if name not in start.settings:
                defined = {**start.defined, str(name): setting}
                start = start.model_copy(update={"settings": [*start.settings, name], "defined": defined})
                self.results.starts[-1] = start
            cause = self.crashes(setting, start)
            if cause is not None:
                return self._end(start, state="engine_failed", cause=cause, message="it died", failed_setting=name)
            shift = speed + own.setdefault(name, self.random.normal(0, self.setting_sd))
            shift += self._cycles.setdefault(step.cycle, self.random.normal(0, self.cycle_sd))
            shift += self.random.normal(0, self.round_sd)
            factor = math.exp(shift) * (self.literal if start.purpose == "literal" else 1.0)
            code = self.discards(setting)
            self.results.rounds.append(
                Round(
                    start=start.number,
                    round=1 + sum(r.start == start.number for r in self.results.rounds),
                    cycle=step.cycle,
                    position=step.position,
                    setting=name,
                    state="kept" if code is None else "discarded",
                    reason=None if code is None else f"because of {code}",
                    code=code,
                    load_s=self.round_s,
                    measurement=Measurement() if code is not None else _measured(self.levels(setting), factor),
                )
            )
            self.results.elapsed_s += self.round_s
        return self._end(start, state="completed")

    def _end(self, start: Start, **changes: object) -> bool:
        load_s = sum(r.load_s for r in self.results.rounds if r.start == start.number)
        time = StartTime(total_s=self.start_s + load_s, engine_start_s=self.start_s, load_s=load_s)
        self.results.starts[-1] = start.model_copy(update={**changes, "time": time})
        return True


def _measured(levels: Levels, factor: float) -> Measurement:
    p90 = levels.p90 * factor
    p99 = (levels.p99 or 1.5 * levels.p90) * factor
    itl = levels.itl * factor
    measured = Measurement(
        ttft_ms=Latency(p50=p90 / 2, p90=p90, p99=p99, mean=p90 / 2, n=200),
        itl_ms=Latency(p50=itl / 2, p90=itl / 1.5, p99=itl, mean=itl / 2, n=2000),
        request_throughput=1000 / p90,
        failed_requests=levels.failed,
        answered_share=levels.answered,
    )
    if levels.peak_fraction is None:
        return measured
    memory = measured.memory.model_copy(update={"source": "nvml", "peak_fraction": levels.peak_fraction})
    return measured.model_copy(update={"memory": memory})
