"""Simulated experiments on recorded landscapes: the real search design with a runner in memory, and its peers."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import optuna
from search_landscapes import FILE, STOCK_CHUNK, THRESHOLD, grid, profile_of

from tuner.domain.experiment import STOCK_ID, Results, Round, SettingId, Start, StartTime
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.profile import Constraint
from tuner.domain.setting import CHUNK_KNOB, STOCK, Setting
from tuner.study.design import SweepDesign
from tuner.study.problem import Group, Problem
from tuner.study.settings import SettingRules, problem_of
from tuner.study.verdict import Decision, decide

START_S, WARM_UP_SHARE = 240.0, 0.3
START_SD, SETTING_SD = 0.03, 0.01
NEAR = 0.03
WINDOW = 0.25
"""Of the local line, on the logarithm of the chunk size."""
TRIALS = 24
"""Settings that the peers measure, a start each."""


@dataclass(frozen=True)
class Landscape:
    """Recorded rounds: `values[cycle, setting, column]`, every setting of the grid."""

    name: str
    columns: list[str]
    settings: list[Setting]
    values: np.ndarray
    problem: Problem

    @cached_property
    def index(self) -> dict[str, int]:
        return {_key(s): i for i, s in enumerate(self.settings)}

    def of(self, setting: Setting) -> int:
        """The recorded setting that does the same; below 512 tokens, the nearest chunk size of the grid."""
        found = self.index.get(_key(setting))
        if found is None:
            chunks = sorted(
                {s.chunk or STOCK_CHUNK for s in self.settings}, key=lambda c: abs(c - (setting.chunk or 0))
            )
            moved = ({**setting.knobs, CHUNK_KNOB: c} for c in chunks)
            keys = (_key(setting.model_copy(update={"knobs": knobs})) for knobs in moved)
            found = next(self.index[key] for key in keys if key in self.index)
        return found

    @property
    def objective(self) -> str:
        return self.problem.objective.metrics[0]

    @cached_property
    def stock(self) -> int:
        return self.of(STOCK)

    def level(self, path: str) -> np.ndarray:
        """The true level of every setting: the geometric mean over all recorded rounds."""
        return np.exp(np.log(self.values[:, :, self.columns.index(path)]).mean(axis=0))

    def limits(self) -> list[Constraint]:
        return [c for c in self.problem.constraints if c.metric in self.columns]

    @cached_property
    def feasible(self) -> np.ndarray:
        found = np.ones(len(self.settings), dtype=bool)
        for constraint in self.limits():
            found &= np.array([constraint.allows(v) for v in self.level(constraint.metric)])
        return found

    @cached_property
    def best(self) -> float:
        """The objective of the best feasible setting of the grid."""
        return float(self.level(self.objective)[self.feasible].min())

    def is_near_best(self, setting: Setting) -> bool:
        i = self.of(setting)
        return bool(self.feasible[i]) and float(self.level(self.objective)[i]) <= (1 + NEAR) * self.best

    def paired_spread(self) -> float:
        """Median over settings: standard deviation of the log difference from stock in one cycle."""
        logs = np.log(self.values[:, :, self.columns.index(self.objective)])
        spreads = (logs - logs[:, [self.stock]]).std(axis=0, ddof=1)
        return float(np.median(np.delete(spreads, self.stock)))

    # --- landscapes made from it ---

    def level_ground(self, *, limits: bool = False) -> Landscape:
        """Every setting made equal to stock, its own noise kept; without limits on latencies unless asked for."""
        logs = np.log(self.values)
        logs += logs[:, [self.stock]].mean(axis=0) - logs.mean(axis=0)
        kept = self.problem.constraints if limits else [c for c in self.problem.constraints if c not in self.limits()]
        return replace(self, values=np.exp(logs), problem=replace(self.problem, constraints=tuple(kept)))

    def with_gain(self, setting: Setting, gain: float) -> Landscape:
        """The objective of one setting lower by `gain`."""
        values = self.values.copy()
        values[:, self.of(setting), self.columns.index(self.objective)] *= 1 - gain
        return replace(self, values=values)

    def with_level(self, path: str, levels: np.ndarray) -> Landscape:
        """Other levels of a metric, its noise kept."""
        values = self.values.copy()
        values[:, :, self.columns.index(path)] *= levels / self.level(path)
        return replace(self, values=values)


def load_landscapes(names: list[str] | None = None) -> dict[str, Landscape]:
    """Those of the committed file, and `mixed` over the chunk size alone."""
    packed = json.loads(gzip.decompress(FILE.read_bytes()))
    found = {}
    for name, data in packed.items():
        settings = [Setting.model_validate(s) for s in data["settings"]]
        problem = problem_of(profile_of(name), default_chunk=STOCK_CHUNK, live=True)
        found[name] = smoothed(Landscape(name, data["columns"], settings, np.array(data["rounds"]), problem))
    if "mixed" in found:
        found["mixed-chunks"] = chunks_alone(found["mixed"])
    return {name: found[name] for name in names or found}


def smoothed(landscape: Landscape) -> Landscape:
    """Levels by a local line over the logarithm of the chunk size, within settings that differ in nothing else.

    The means of a few dozen rounds scatter more than neighbours on the grid differ (their differences have a chi-square
    of 1 per degree of freedom where chunks are not small), and the lowest of many such means is not the best setting.
    Noise and its pairing stay as recorded.
    """
    families: dict[str, list[int]] = {}
    for i, setting in enumerate(landscape.settings):
        families.setdefault(_others(setting), []).append(i)
    means = np.log(landscape.values).mean(axis=0)
    shift = np.zeros_like(means)
    for members in families.values():
        x = np.log([landscape.settings[i].chunk or STOCK_CHUNK for i in members])
        for i, at in zip(members, x, strict=True):
            weights = np.clip(1 - np.abs((x - at) / WINDOW) ** 3, 0, None) ** 3
            if (weights > 0).sum() > 2:
                design = np.stack([np.ones_like(x), x - at], axis=1) * np.sqrt(weights)[:, None]
                fit = np.linalg.lstsq(design, means[members] * np.sqrt(weights)[:, None], rcond=None)[0]
                shift[i] = fit[0] - means[i]
    return replace(landscape, values=landscape.values * np.exp(shift))


def chunks_alone(landscape: Landscape) -> Landscape:
    """Without the other knobs."""
    kept = [i for i, s in enumerate(landscape.settings) if set(s.knobs) == {CHUNK_KNOB} and s.reuse_budget is None]
    group = landscape.problem.groups[0]
    listed = tuple(s for s in group.settings if set(s.knobs) == {CHUNK_KNOB} and s.reuse_budget is None)
    problem = replace(landscape.problem, groups=(Group({}, listed),))
    settings = [landscape.settings[i] for i in kept]
    return replace(landscape, name="mixed-chunks", settings=settings, values=landscape.values[:, kept], problem=problem)


def _key(setting: Setting) -> str:
    """Equal for settings that do the same: chunk, threshold where it is below the chunk, budget."""
    chunk = setting.chunk or STOCK_CHUNK
    threshold = int(setting.knobs.get(THRESHOLD) or 0)
    budget = setting.reuse_budget.to_json() if setting.reuse_budget else None
    return json.dumps([chunk, threshold if threshold < chunk else 0, budget], sort_keys=True)


class Counter:
    """A registry that counts."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []
        self._number: dict[str, int] = {}

    def id_of(self, setting: Setting) -> SettingId:
        if setting.is_stock:
            return STOCK_ID
        if setting.key not in self._number:
            self._number[setting.key] = len(self.settings)
            self.settings.append(setting)
        return self._number[setting.key]

    def propose(self, group: Group, count: int) -> list[Setting]:
        return []


@dataclass
class World:
    """Engine starts on a landscape, in memory and without waiting."""

    landscape: Landscape
    random: np.random.Generator
    results: Results = field(default_factory=Results)
    cycles: dict[int, int] = field(default_factory=dict)

    def run(self, design: SweepDesign) -> Results:
        """All that `tuner.experiment.runner` does, with times added up in place of passing."""
        results = self.results
        while (plan := design.next_start(results)) is not None:
            chunk = plan.engine_args.get(CHUNK_KNOB, STOCK_CHUNK)
            start = Start(
                number=len(results.starts) + 1,
                purpose=plan.purpose,
                label=plan.label,
                state="interrupted",
                engine_args=plan.engine_args,
                reuse_budget=plan.reuse_budget,
                effective_args={**plan.engine_args, CHUNK_KNOB: chunk},
                stock_chunk=STOCK_CHUNK,
                live=plan.live,
                start_s=START_S,
                settings=[n.id for n in plan.settings],
                defined={str(n.id): n.setting for n in plan.settings},
            )
            results.starts.append(start)
            results.elapsed_s += START_S
            engine = Engine(self.landscape, self.random)
            load_s = 0.0
            while (step := design.next_step(results, start)) is not None:
                if step.named.id not in start.settings:
                    start.settings.append(step.named.id)
                    start.defined[str(step.named.id)] = step.named.setting
                cycle = self.cycles.setdefault(step.cycle, int(self.random.integers(len(self.landscape.values))))
                measurement, seconds, warm_up_s = engine.round(step.named.setting, cycle)
                results.rounds.append(
                    Round.model_construct(
                        start=start.number,
                        round=1 + sum(r.start == start.number for r in results.rounds),
                        cycle=step.cycle,
                        position=step.position,
                        setting=step.named.id,
                        state="kept",
                        reason=None,
                        code=None,
                        load_s=seconds,
                        measurement=measurement,
                    )
                )
                load_s += seconds + warm_up_s
                results.elapsed_s += seconds + warm_up_s
            time = StartTime(total_s=START_S + load_s, engine_start_s=START_S, load_s=load_s)
            results.starts[-1] = start.model_copy(update={"state": "completed", "time": time})
        return results


class Engine:
    """One start: its own speed, and a deviation of its own for each setting."""

    def __init__(self, landscape: Landscape, random: np.random.Generator) -> None:
        self._landscape = landscape
        self._random = random
        self._speed = random.normal(0, START_SD)
        self._own: dict[int, float] = {}
        self._warm: set[int] = set()

    def round(self, setting: Setting, cycle: int) -> tuple[Measurement, float, float]:
        """The measurement, the seconds of the round, and those of a warm-up before it."""
        landscape = self._landscape
        i = landscape.of(setting)
        own = self._own.setdefault(i, self._random.normal(0, SETTING_SD))
        factor = math.exp(self._speed + own)
        row = dict(zip(landscape.columns, landscape.values[cycle, i], strict=True))
        seconds = row.pop("seconds")
        warm_up_s = 0.0 if setting.chunk in self._warm else WARM_UP_SHARE * seconds
        self._warm.add(setting.chunk)
        return measurement_of({path: value * factor for path, value in row.items()}), seconds, warm_up_s


def measurement_of(values: dict[str, float]) -> Measurement:
    """Latencies by path; all requests succeeded. Not validated, for speed."""
    parts: dict[str, dict[str, float]] = {}
    for path, value in values.items():
        name, _, statistic = path.rpartition(".")
        parts.setdefault(name, {})[statistic] = value
    latencies = {
        name: Latency.model_construct(**{"p50": 1.0, "p90": 1.0, "p99": 1.0, "mean": 1.0, "n": 100} | found)
        for name, found in parts.items()
    }
    groups = {name.partition(".")[2]: found for name, found in latencies.items() if name.startswith("groups.")}
    plain = {name: found for name, found in latencies.items() if not name.startswith("groups.")}
    return _EMPTY.model_copy(update={**plain, "groups": groups, "failed_requests": 0})


_EMPTY = Measurement()


@dataclass(frozen=True)
class Outcome:
    """One simulated sweep."""

    starts: int
    minutes: float
    decision: Decision
    leader: Setting | None
    frozen: Setting | None
    results: Results


def sweep(landscape: Landscape, seed: int) -> Outcome:
    """The product's design on a landscape."""
    random = np.random.default_rng([seed, 7])
    registry = Counter()
    problem = replace(landscape.problem, seed=seed)
    world = World(landscape, random)
    results = world.run(SweepDesign(problem, registry))
    decision = decide(problem, results, registry)
    settings = dict(results.settings())
    leader = None if decision.leader is None else settings.get(decision.leader, STOCK)
    return Outcome(len(results.starts), results.elapsed_s / 60, decision, leader, decision.setting, results)


def one_by_one(landscape: Landscape, sampler: str, seed: int) -> tuple[int, float, Setting | None]:
    """A start for each setting and three rounds on it, medians, limits as cuts: grid, random or TPE."""
    random = np.random.default_rng([seed, 8])
    rules = SettingRules(landscape.problem.base_args, STOCK_CHUNK)
    study = _study(sampler, seed)
    listed = [STOCK, *landscape.problem.groups[0].settings]
    others = sorted({_others(s) for s in landscape.settings})
    chunks = grid(profile_of("mixed" if landscape.name == "mixed-chunks" else landscape.name))
    seconds, best = 0.0, None
    count = min(TRIALS, len(listed)) if sampler == "grid" else TRIALS
    for number in range(count):
        trial = None
        if sampler == "grid":
            setting = listed[round(number * (len(listed) - 1) / max(1, count - 1))]
        else:
            trial = study.ask()
            chunk = chunks[trial.suggest_int("chunk", 0, len(chunks) - 1)]
            other = json.loads(others[trial.suggest_int("others", 0, len(others) - 1)])
            setting = rules.reduced(Setting.model_validate({**other, "knobs": {**other["knobs"], CHUNK_KNOB: chunk}}))
        engine = Engine(landscape, random)
        rounds = [engine.round(setting, int(random.integers(len(landscape.values)))) for _ in range(3)]
        seconds += START_S + sum(s + w for _, s, w in rounds)
        value, broken = _median(landscape, [m for m, _, _ in rounds])
        if trial is not None:
            trial.set_constraint("limits", broken)
            study.tell(trial, value)
        if broken <= 0 and (best is None or value < best[0]):
            best = (value, setting)
    return count, seconds / 60, None if best is None else best[1]


def _others(setting: Setting) -> str:
    knobs = {name: value for name, value in setting.knobs.items() if name != CHUNK_KNOB}
    return json.dumps({"knobs": knobs, "reuse_budget": setting.to_json()["reuse_budget"]}, sort_keys=True)


def _median(landscape: Landscape, rounds: list[Measurement]) -> tuple[float, float]:
    from tuner.domain.measurement import metric

    def middle(path: str) -> float:
        return float(np.median([metric(r, path) for r in rounds]))

    excess = [c.excess(middle(c.metric)) for c in landscape.limits()]
    return middle(landscape.objective), max(excess, default=0.0)


def _study(sampler: str, seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    return optuna.create_study(sampler=samplers.get(sampler, samplers["random"])(seed=seed))
