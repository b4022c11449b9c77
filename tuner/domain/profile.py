"""The profile: what to serve, on what, under which load, and what to look for."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PositiveInt, model_validator

from tuner.domain.base import Argument, Document
from tuner.domain.measurement import Measurement, is_group_metric, metric, metric_names
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar
from tuner.domain.units import Duration, sized
from tuner.domain.workload import Workload

DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's own, where a profile says nothing (0.32)."""

ReferenceName = Literal["stock", "no_chunking"]


class Hardware(Document):
    """What the simulated engine pretends to be; NVML says what a real node is."""

    gpu: str = "h100_sxm"
    """System name of aiconfigurator-core."""
    count: PositiveInt = 1
    """GPUs, at least as many as `tensor_parallel_size` asks for."""
    cost_model: str | None = None
    """The name under which aiconfigurator-core knows the model; the profile's model when null."""


_SECRET = re.compile(r"TOKEN(?!IZER|S)|SECRET|PASSW(OR)?D|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds something that is never written down."""
    return _SECRET.search(name) is not None


def _settable(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be set in an environment: a name has no '=', nothing has a NUL")
    return env


Environment = Annotated[dict[str, str], AfterValidator(_settable)]


def _with_sizes(options: Any) -> Any:
    return {name: sized(str(name), value) for name, value in options.items()} if isinstance(options, dict) else options


class EngineSpec(Document):
    """How `vllm serve` is started, whatever the setting."""

    args: Annotated[dict[str, Scalar], BeforeValidator(_with_sizes)] = Field(default_factory=dict)
    """`vllm serve` options in snake case."""
    env: Environment = Field(default_factory=lambda: dict[str, str]())
    """Environment of the engine, laid over that of the command; no secrets here."""
    startup_timeout: Duration = 1200.0
    """How long a start may go on without a sign of progress, which is a new line in the log or a growing download.

    Three times as long in all.
    """
    block_size: PositiveInt | None = None
    """Tokens of a KV block when neither `args` nor the engine says; 16 otherwise."""


_LARGEST = 1e15
"""Of a range: above it, a float does not tell whole numbers apart."""


class KnobRange(Document):
    """A numeric knob between `low` and `high`, both included.

    With `step`, every step is a value. Without, 17 values are spread over the range, evenly or, with `log`, by equal
    ratios; chunk sizes with `log` are two an octave, to be refined later, and eight an octave with `refine: false`.
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> KnobRange:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g})")
        if max(abs(self.low), abs(self.high)) > _LARGEST:
            raise ValueError(f"low and high are at most {_LARGEST:g}")
        if self.step is not None and self.step * _LARGEST < 1:
            raise ValueError(f"step ({self.step:g}) has to be above 0; leave it out to spread values evenly")
        if self.log and self.step is not None:
            raise ValueError("log and step do not go together: give one of them")
        if self.log and self.low <= 0:
            raise ValueError("log needs low above 0")
        return self


KnobSpec = Annotated[list[Scalar], Field(min_length=1)] | KnobRange


class Space(Document):
    """Knobs by vLLM's own names; unknown names are checked against the installed vLLM, not here."""

    knobs: Annotated[dict[str, KnobSpec], BeforeValidator(_with_sizes)]
    reuse_budget: Annotated[dict[str, KnobSpec], BeforeValidator(_with_sizes)] = Field(default_factory=dict)
    refine: bool = True
    """Whether chunk sizes between the listed ones are tried around the best."""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if isinstance(value, dict) and "knobs" not in value:
            rest = dict(value)
            budget = rest.pop("reuse_budget", None)
            refine = {"refine": rest.pop("refine")} if "refine" in rest else {}
            return {"knobs": rest, "reuse_budget": {} if budget is None else budget, **refine}
        return value

    @model_validator(mode="after")
    def _known_budget(self) -> Space:
        known = ReuseBudget.model_fields
        for name, given in self.reuse_budget.items():
            if name not in known:
                raise ValueError(f"reuse_budget has no knob {name!r}; it has {', '.join(known)}")
            if isinstance(given, list) and any(isinstance(v, bool | str) for v in given):
                raise ValueError(f"reuse_budget.{name} takes numbers; 0 turns it off")
        if not self.knobs and not self.reuse_budget:
            raise ValueError(f"the space is empty: give at least {CHUNK_KNOB}")
        return self


_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONSTRAINT = re.compile(r"^\s*([\w.]+)\s*(<=|>=|==|<|>)\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*$")


def _known_metric(path: str) -> str:
    if path not in metric_names() and not is_group_metric(path):
        import difflib

        near = difflib.get_close_matches(path, metric_names(), n=1, cutoff=0.5)
        raise ValueError(f"no metric {path!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return path


MetricName = Annotated[str, AfterValidator(_known_metric)]


class Constraint(Document):
    """A comparison of one metric with a number, such as `ttft_ms.p99 <= 280`."""

    metric: MetricName
    op: Literal["<=", ">=", "==", "<", ">"]
    limit: float

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """ValueError when the text is no comparison or names no metric."""
        match = _CONSTRAINT.match(text)
        if match is None:
            raise ValueError(f"{text!r} is no comparison such as 'ttft_ms.p99 <= 280'")
        path, op, limit = match.groups()
        return cls.model_validate({"metric": path, "op": op, "limit": float(limit)})

    def allows(self, value: float) -> bool:
        """Whether a value of the metric is within the limit."""
        return _OPERATORS[self.op](value, self.limit)

    def holds(self, measurement: Measurement) -> bool | None:
        """None when the metric was not measured."""
        value = metric(measurement, self.metric)
        return None if value is None else self.allows(value)

    def excess(self, value: float) -> float:
        """How far outside the limit, relative to it: 0 or less exactly when the value is allowed."""
        off = value - self.limit
        off = {"<": off, ">": -off}.get(self.op[0], abs(off)) / (abs(self.limit) or 1.0)
        return min(off, 0.0) if self.allows(value) else max(off, 1e-9)

    def __str__(self) -> str:
        return f"{self.metric} {self.op} {self.limit:g}"


def _constraint_before(value: Any) -> Any:
    return Constraint.parse(value) if isinstance(value, str) else value


ConstraintText = Annotated[
    Constraint, BeforeValidator(_constraint_before), PlainSerializer(lambda c: str(c), return_type=str)
]


class Objective(Document):
    """One or two metrics to minimize, or to maximize."""

    minimize: list[str] = Field(default_factory=list)
    maximize: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: [v] if isinstance(v, str) else v for k, v in value.items()}
        return value

    @model_validator(mode="after")
    def _one_or_two(self) -> Objective:
        if not 1 <= len(self.metrics) <= 2:
            raise ValueError("name one or two metrics to minimize or maximize")
        if len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"{self.metrics[0]} is named twice; name two different metrics, or one")
        for path in self.metrics:
            _known_metric(path)
        return self

    @property
    def metrics(self) -> list[str]:
        """The metrics, minimized ones first."""
        return [*self.minimize, *self.maximize]

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        down: list[Literal["minimize", "maximize"]] = ["minimize"] * len(self.minimize)
        return down + ["maximize"] * len(self.maximize)

    @property
    def signs(self) -> list[float]:
        """For each metric what turns it into a cost: 1, or -1 where more is better."""
        return [1.0 if direction == "minimize" else -1.0 for direction in self.directions]


class Budget(Document):
    """When to stop searching: whichever comes first."""

    trials: PositiveInt = 64
    """Most settings measured, refinement included; stock and the references come on top."""
    time: Duration | None = None
    """Of the whole sweep, finals included; kept within the length of one start."""


class Profile(Document):
    """A whole profile, as in `profiles/*.yaml`."""

    version: Literal[1]
    name: str
    """Names the study's folder."""
    model: Argument
    """What `vllm serve` is given: a hub name or a path."""
    description: str = ""
    hardware: Hardware = Hardware()
    engine: EngineSpec = EngineSpec()
    workload: Workload
    rounds: PositiveInt = 3
    """Least rounds of a setting before it may be eliminated, and of each setting in a final start."""
    space: Space
    references: list[ReferenceName] = Field(default_factory=lambda: list[ReferenceName](["stock"]))
    """Measured beside the settings of the space and never the winner; `stock` always is, and may stay."""
    objective: Objective = Objective(minimize=["ttft_ms.p90"])
    constraints: list[ConstraintText] = Field(default_factory=list)
    """Limits that the frozen setting has to meet."""
    budget: Budget = Budget()
    regress_metrics: list[MetricName] = Field(default_factory=lambda: ["ttft_ms.p90", "request_throughput"])
    """Metrics that the nightly gate stands on."""

    @model_validator(mode="after")
    def _groups_are_in_the_load(self) -> Profile:
        names = self.workload.group_names
        for path in [*self.objective.metrics, *(c.metric for c in self.constraints), *self.regress_metrics]:
            if is_group_metric(path) and path.split(".")[1] not in names:
                has = f"it has {', '.join(names)}" if names else "it has no classes"
                raise ValueError(f"{path}: no class of this load has that name ({has})")
        return self

    @model_validator(mode="after")
    def _load_shows_every_metric(self) -> Profile:
        for path in [*self.objective.metrics, *(c.metric for c in self.constraints), *self.regress_metrics]:
            if why := self.workload.cannot_measure(path):
                raise ValueError(f"{why}; ask for at least two output tokens, or take that metric out")
        return self

    @model_validator(mode="after")
    def _memory_limit_can_hold(self) -> Profile:
        target = self.engine.args.get("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION)
        for constraint in self.constraints:
            below = constraint.metric == "memory.peak_fraction" and constraint.op in ("<", "<=")
            if below and isinstance(target, int | float) and constraint.limit < target:
                raise ValueError(
                    f"constraints: '{constraint}' can never hold: vLLM preallocates its KV pool up to "
                    f"gpu_memory_utilization ({target:g}), whatever the chunk size; lower that option, or "
                    "limit kv_cache_usage_peak instead"
                )
        return self
