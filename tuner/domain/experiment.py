"""An experiment on disk and in memory: starts x settings x rounds, and what a study makes of them.

A *start* is one engine process from launch to stop. Within it, settings are measured in *rounds*; a *cycle* is
one pass over the settings under test, all with the same arrivals and lengths. Differences between settings are
paired within cycles, and starts are the unit of replication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import Field

from tuner.domain.base import Document
from tuner.domain.measurement import Ci95, Interval, Measurement
from tuner.domain.setting import ReuseBudget, Scalar, Setting

START_SCHEMA: Final = "chunktune.start/1"
ROUND_SCHEMA: Final = "chunktune.round/1"
STUDY_SCHEMA: Final = "chunktune.study/2"
SUMMARY_SCHEMA: Final = "chunktune.summary/2"

SettingId = int | str
"""A study: the Optuna trial number, or `stock`. A comparison: `A` and `B`. A nightly run: `frozen` and `stock`."""
STOCK_ID: Final = "stock"
Purpose = Literal["search", "final", "literal", "single", "regress", "compare", "bench"]
StartState = Literal["completed", "infeasible", "engine_failed", "load_failed", "interrupted"]
SettingState = Literal["measured", "eliminated", "infeasible", "failed"]
Code = str
"""A stable cause code: see `tuner.engine.causes.CAUSES`."""


class Diagnosis(Document):
    """Why an engine failed: a stable code, a sentence, what to do, and where it is written."""

    code: Code
    message: str
    hint: str = ""
    log_path: str | None = None
    tail: list[str] = Field(default_factory=list)
    """The last lines of the log, for `unknown`."""
    bound: int | None = None
    """A limit read from the failure, such as the smallest chunk that a hybrid model takes."""


class StartTime(Document):
    """Where the seconds of a start went; the parts are disjoint, the rest of `total_s` is our own."""

    total_s: float = 0.0
    engine_start_s: float = 0.0
    load_s: float = 0.0
    stop_s: float = 0.0


class Start(Document):
    """`start.json`."""

    schema_: Literal["chunktune.start/1"] = Field(default=START_SCHEMA, alias="schema")
    number: int
    purpose: Purpose
    label: str = ""
    """For people: `search`, `final 2 of 3`, `literal`."""
    state: StartState
    cause: Code | None = None
    message: str | None = None
    hint: str | None = None
    bound: int | None = None
    """A limit that the engine's refusal named, such as the smallest chunk it takes."""
    failed_setting: SettingId | None = None
    """The setting under load, or just applied, when the start failed."""
    simulated: bool = False
    engine_args: dict[str, Scalar]
    """Asked for."""
    reuse_budget: ReuseBudget | None = None
    """The budget that the engine was started with; None for a live start, where it is switched."""
    effective_args: dict[str, Scalar] | None = None
    """Read back from the engine; null when it never became ready."""
    stock_chunk: int | None = None
    """The chunk size that this engine chooses when it is not told any; null when it does not say."""
    model_revision: str | None = None
    vllm_version: str | None = None
    command: list[str] = Field(default_factory=list)
    live: bool = False
    """True where settings were switched within the start."""
    start_s: float = 0.0
    """From launch until ready and read back."""
    settings: list[SettingId] = Field(default_factory=list)
    defined: dict[str, Setting] = Field(default_factory=dict)
    """What each id of `settings` stands for, by its text."""
    warnings: list[str] = Field(default_factory=list)
    started_at: str = ""
    time: StartTime = StartTime()


class Round(Document):
    """A row of `rounds.jsonl`: one load on one setting."""

    schema_: Literal["chunktune.round/1"] = Field(default=ROUND_SCHEMA, alias="schema")
    start: int
    round: int
    """From 1 within the start; names `round-<n>.requests.jsonl.gz`."""
    cycle: int
    """From 0 over the whole experiment; rounds of one cycle share arrivals and lengths."""
    position: int
    """From 0: how many settings of the cycle were measured before this one."""
    setting: SettingId
    state: Literal["kept", "discarded"]
    reason: str | None = None
    """Why it was discarded."""
    code: str | None = None
    """The stable code of that reason."""
    load_s: float = 0.0
    measurement: Measurement

    @property
    def kept(self) -> bool:
        return self.state == "kept"


@dataclass
class Results:
    """Everything that an experiment has measured so far, in order; what a design decides from."""

    starts: list[Start] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    elapsed_s: float = 0.0
    """Time spent on the experiment until now, earlier runs included."""

    def kept(self, setting: SettingId | None = None, *, starts: Sequence[int] | None = None) -> list[Round]:
        """The rounds that count, of one setting and of some starts where these are given."""
        return [
            r for r in self.rounds if r.kept and setting in (None, r.setting) and (starts is None or r.start in starts)
        ]

    def numbers(self, *purposes: Purpose, states: Sequence[StartState] = ("completed",)) -> list[int]:
        """Numbers of the starts with one of these purposes (all when none is named) and states."""
        return [s.number for s in self.starts if (not purposes or s.purpose in purposes) and s.state in states]

    def settings(self) -> Iterator[tuple[SettingId, Setting]]:
        """Every setting that a start has defined, once, in the order of their first appearance."""
        seen = set()
        for start in self.starts:
            for name in start.settings:
                if name not in seen and str(name) in start.defined:
                    seen.add(name)
                    yield name, start.defined[str(name)]

    @property
    def next_cycle(self) -> int:
        """The number of a cycle that has not begun."""
        return max((r.cycle for r in self.rounds), default=-1) + 1


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

    schema_: Literal["chunktune.study/2"] = Field(default=STUDY_SCHEMA, alias="schema")
    study: str
    profile: dict[str, Any]
    """The profile as resolved, with overrides applied."""
    fingerprint: Fingerprint
    workload_sha256: str
    engine_kind: Literal["vllm", "sim"]
    simulated: bool
    versions: dict[str, str]
    """Of chunktune, Python, Optuna and the engine."""
    design: dict[str, Any] = Field(default_factory=dict)
    """The search design with its parameters: `sampler`, `live`, stages, cycles, alpha."""
    seed: int
    created_at: str


class Contrast(Document):
    """A setting against stock in one metric: `change` is relative, negative is lower."""

    change: float
    ci95: Interval | None = None


class SettingLine(Document):
    """One setting in `summary.json`."""

    id: SettingId
    label: str
    knobs: dict[str, Any]
    state: SettingState
    cause: str | None = None
    """A code for `infeasible` and `failed`; for `eliminated` the sentence that says by what."""
    starts: int = 0
    rounds: int = 0
    median: Measurement | None = None
    ci95: Ci95 = Field(default_factory=dict)
    vs_stock: dict[str, Contrast] = Field(default_factory=dict)
    p_feasible: float | None = None
    """Probability that it meets every constraint; null when it was not measured."""


class StudyTime(Document):
    """Every second of a sweep, of all its runs; the parts add up to `total_s`."""

    total_s: float
    engine_start_s: float
    """Starts and stops."""
    load_s: float
    overhead_s: float
    """The rest."""
    starts: int = 0


class TableRow(Document):
    """One chunk size, at its best."""

    max_num_batched_tokens: int | None
    setting: SettingId
    label: str = ""
    memory_bytes: int | None = None
    memory_source: str = "unavailable"
    ttft_p50_ms: float | None = None
    ttft_p90_ms: float | None = None
    ttft_p99_ms: float | None = None
    prefix_hit_rate: float | None = None
    prefill_chunks_per_request: float | None = None
    violates: list[str] = Field(default_factory=list)
    """Constraints that it does not meet with a probability of at least a half."""
    winner: bool = False


Verdict = Literal["better", "stock", "none"]


class StudySummary(Document):
    """`summary.json`."""

    schema_: Literal["chunktune.summary/2"] = Field(default=SUMMARY_SCHEMA, alias="schema")
    study: str
    simulated: bool
    verdict: Verdict
    sentence: str
    """The verdict in words; table, sentence and frozen file are made of the same contrasts."""
    winner: SettingId | None
    settings: list[SettingLine] = Field(default_factory=list)
    finals: list[SettingLine] = Field(default_factory=list)
    """The same on the final starts only."""
    advice: list[str] = Field(default_factory=list)
    starts: list[str] = Field(default_factory=list)
    counts: dict[str, int] = Field(default_factory=dict)
    time: StudyTime
    table: list[TableRow] = Field(default_factory=list)
