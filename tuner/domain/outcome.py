"""What became of a trial, and of a study."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from tuner.domain.base import Document
from tuner.domain.candidate import ReuseBudget, Scalar
from tuner.domain.measurement import Ci95, Interval, Latency, Measurement

TRIAL_SCHEMA: Final = "chunktune.trial/1"
STUDY_SCHEMA: Final = "chunktune.study/1"
SUMMARY_SCHEMA: Final = "chunktune.summary/1"

Role = Literal["baseline", "reference", "candidate", "final"]
State = Literal["completed", "infeasible", "engine_failed", "load_failed", "interrupted", "pruned"]
Code = str
"""A stable cause code: see `tuner.engine.diagnosis.CAUSES`."""


class Diagnosis(Document):
    """Why an engine failed: a stable code, a sentence, what to do, and where it is written."""

    code: Code
    message: str
    mend: str = ""
    log_path: str | None = None
    tail: list[str] = Field(default_factory=list)
    """The last lines of the log, for `unknown`."""
    bound: int | None = None
    """A limit read from the failure, such as the smallest chunk that a hybrid model takes."""


class TrialTime(Document):
    """Where a trial's seconds went; the parts are disjoint, the rest of `total_s` is our own."""

    total_s: float = 0.0
    engine_start_s: float = 0.0
    load_s: float = 0.0
    stop_s: float = 0.0


class Trial(Document):
    """`trial.json`."""

    schema_: Literal["chunktune.trial/1"] = Field(default=TRIAL_SCHEMA, alias="schema")
    number: int
    role: Role
    label: str = ""
    """What people call it: `stock`, `no_chunking`, `chunk 512`."""
    state: State
    cause: Code | None = None
    message: str | None = None
    mend: str | None = None
    bound: int | None = None
    """A limit that the engine's refusal named, such as the smallest chunk it takes."""
    simulated: bool = False
    engine_args: dict[str, Scalar]
    """Asked for."""
    effective_args: dict[str, Scalar] | None = None
    """Read back from the engine."""
    model_revision: str | None = None
    """Of the weights that the engine loaded, where it is known."""
    knobs: dict[str, Scalar] = Field(default_factory=dict)
    reuse_budget: ReuseBudget | None = None
    command: list[str] = Field(default_factory=list)
    rounds: list[Measurement] = Field(default_factory=list)
    """Every round driven; a void one says why and counts for nothing."""
    median: Measurement | None = None
    pooled: dict[str, Latency] = Field(default_factory=dict)
    """Percentiles over the requests of all rounds together."""
    ci95: Ci95 = Field(default_factory=dict)
    violations: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    started_at: str = ""
    time: TrialTime = TrialTime()
    final_of: int | None = None
    """For a final: the trial whose configuration it measures again."""


class Fingerprint(Document):
    """What a measurement depends on, beside the configuration."""

    vllm_version: str | None = None
    model: str
    model_revision: str | None = None
    gpus: list[dict[str, Any]] = Field(default_factory=list)
    """`{name, memory_bytes}` by device."""
    driver_version: str | None = None
    engine: Literal["vllm", "sim"]


class StudyFile(Document):
    """`study.json`."""

    schema_: Literal["chunktune.study/1"] = Field(default=STUDY_SCHEMA, alias="schema")
    study: str
    profile: dict[str, Any]
    """The profile as resolved, with overrides applied."""
    fingerprint: Fingerprint
    space_sha256: str
    workload_sha256: str
    engine_kind: Literal["vllm", "sim"]
    simulated: bool
    versions: dict[str, str]
    """Of chunktune, Python, Optuna and the engine."""
    sampler: str
    seed: int
    created_at: str
    base_args: dict[str, Scalar] = Field(default_factory=dict)


class TrialLine(Document):
    """One trial in `summary.json`."""

    number: int
    role: Role
    label: str = ""
    state: State
    cause: Code | None = None
    knobs: dict[str, Any]
    values: dict[str, float | None]
    violations: list[str] = Field(default_factory=list)


class Improvement(Document):
    """The winner against the baseline in one metric; `change` is relative, negative is lower."""

    baseline: float
    best: float
    change: float
    ci95: Interval | None = None


class StudyTime(Document):
    """Every second of a sweep, of all its runs; the other three add up to `total_s`."""

    total_s: float
    engine_start_s: float
    """Starts and stops."""
    load_s: float
    overhead_s: float
    """Our own share: the rest."""


class TableRow(Document):
    """One chunk size, at its best."""

    max_num_batched_tokens: int | None
    trial: int
    label: str = ""
    memory_bytes: int | None = None
    memory_source: str = "unavailable"
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    prefix_hit_rate: float | None = None
    prefill_chunks_per_request: float | None = None
    best: bool = False


class Summary(Document):
    """`summary.json`."""

    schema_: Literal["chunktune.summary/1"] = Field(default=SUMMARY_SCHEMA, alias="schema")
    study: str
    simulated: bool
    baseline: int | None
    best: int | None
    improvement: dict[str, Improvement] = Field(default_factory=dict)
    advice: list[str] = Field(default_factory=list)
    trials: list[TrialLine] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    time: StudyTime
    table: list[TableRow] = Field(default_factory=list)


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


Command = Annotated[list[str], BeforeValidator(_as_list)]
