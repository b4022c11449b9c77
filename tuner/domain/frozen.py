"""The frozen configuration: what goes into version control."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from tuner.domain.base import Argument, Document
from tuner.domain.experiment import Fingerprint, SettingId
from tuner.domain.measurement import Ci95, Measurement
from tuner.domain.profile import ConstraintText, Environment, Hardware, MetricName, Objective
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.domain.workload import Workload

FROZEN_SCHEMA: Final = "chunktune.frozen/2"


class Measured(Document):
    """What a setting delivered when it was frozen, over fresh engine starts."""

    starts: PositiveInt
    rounds: list[Measurement]
    rounds_per_start: list[int] = Field(default_factory=list)
    """How many of `rounds`, in order, belong to each start."""
    median: Measurement
    ci95: Ci95 = Field(default_factory=dict)


class MeasuredStock(Measured):
    """The stock setting, measured in the same starts as the frozen one."""

    engine_args: dict[str, Scalar]


class StudyRef(Document):
    """Where it came from."""

    name: str
    counts: dict[str, int] = Field(default_factory=dict)
    sampler: str = ""
    """How settings were chosen: `enumeration` or the name of Optuna's sampler."""
    seed: int = 0


class Frozen(Document):
    """`frozen.json`. `engine_args` are effective values under vLLM's names, without host, port or served name."""

    schema_: Literal["chunktune.frozen/2"] = Field(default=FROZEN_SCHEMA, alias="schema")
    verdict: Literal["better", "stock", "chosen"]
    """`stock`: no setting was better than stock beyond doubt, so stock itself is frozen. `chosen`: the study's
    verdict was another one; somebody named this setting."""
    setting: SettingId
    created_at: str
    chunktune_version: str
    simulated: bool
    model: Argument
    engine_args: dict[str, Scalar]
    reuse_budget: ReuseBudget | None = None
    command: list[str]
    engine_env: Environment = Field(default_factory=lambda: dict[str, str]())
    """Environment the engine was measured with; never a secret."""
    startup_timeout_s: NonNegativeFloat = 1200.0
    hardware: Hardware = Hardware()
    fingerprint: Fingerprint
    workload: Workload
    workload_sha256: str
    measured: Measured
    stock: MeasuredStock | None = None
    """Null only where stock could not be measured."""
    objective: Objective
    constraints: list[ConstraintText] = Field(default_factory=list)
    regress_metrics: list[MetricName] = Field(default_factory=lambda: ["ttft_ms.p90", "request_throughput"])
    study: StudyRef
    previous: list[dict[str, Any]] = Field(default_factory=list)
    """Earlier `measured` and `stock`, kept by a rebase; the first one is the oldest."""
