"""The frozen configuration: what goes into version control."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from tuner.domain.base import Argument, Document
from tuner.domain.candidate import ReuseBudget, Scalar
from tuner.domain.measurement import Ci95, Measurement
from tuner.domain.outcome import Fingerprint
from tuner.domain.profile import ConstraintText, Environment, Hardware, MetricName, Objective
from tuner.domain.workload import Workload

FROZEN_SCHEMA: Final = "chunktune.frozen/1"


class Baseline(Document):
    """What the frozen configuration delivered when it was frozen."""

    starts: PositiveInt
    """Fresh engine starts behind it."""
    rounds: list[Measurement]
    rounds_per_start: list[int] = Field(default_factory=list)
    """How many of `rounds`, in order, belong to each start."""
    median: Measurement
    ci95: Ci95 = Field(default_factory=dict)


class Control(Document):
    """The stock configuration, as measured beside the frozen one: it tells what the machine itself changed."""

    engine_args: dict[str, Scalar]
    baseline: Baseline


class StudyRef(Document):
    """Where it came from."""

    name: str
    counts: dict[str, int] = Field(default_factory=dict)
    sampler: str = ""
    seed: int = 0
    trial: int | None = None


class Frozen(Document):
    """`frozen.json`. `engine_args` are effective values under vLLM's names, without host, port or served name."""

    schema_: Literal["chunktune.frozen/1"] = Field(default=FROZEN_SCHEMA, alias="schema")
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
    baseline: Baseline
    control: Control | None = None
    """Null when the frozen configuration is the stock one, or stock was not measured."""
    objective: Objective
    constraints: list[ConstraintText] = Field(default_factory=list)
    regress_metrics: list[MetricName] = Field(default_factory=lambda: ["ttft_ms.p90", "request_throughput"])
    study: StudyRef
    previous: list[dict[str, Any]] = Field(default_factory=list)
    """Older baselines, kept by a rebase."""
