"""The runs so far: JSON lines that only grow, and what a new run may take from them.

What a run is judged against never comes from here, but from the frozen file. Earlier runs say how far starts lie
apart (only runs that were ok), and the last one may be judged together with the new one. So broken runs cannot
become the new normal.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import orjson
from pydantic import Field, ValidationError

from tuner.domain.base import Document
from tuner.domain.experiment import Contrast, Fingerprint
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Interval
from tuner.errors import FileFormatError
from tuner.freeze.fingerprint import differences
from tuner.regress.spread import Starts
from tuner.regress.verdict import Evidence, MetricVerdict, Word

HISTORY_SCHEMA: Final = "chunktune.history/1"
RECENT_RUNS = 14
"""Runs that the spread and the rolling view look back on."""


class HistoryMetric(Document):
    """One metric of one run, as it was judged."""

    level: float | None
    change: float | None
    """Against the freeze, relative."""
    ci95: Interval | None
    vs_stock: Contrast | None = None
    verdict: Word
    gate: bool
    suspicious: bool = False

    @classmethod
    def of(cls, m: MetricVerdict) -> HistoryMetric:
        """What of a verdict goes into the history."""
        return cls(level=m.now, **{name: getattr(m, name) for name in cls.model_fields if name != "level"})


class HistoryRow(Document):
    """One run."""

    schema_: Literal["chunktune.history/1"] = Field(default=HISTORY_SCHEMA, alias="schema")
    time: str
    frozen_id: str
    verdict: Word
    fingerprint: Fingerprint
    simulated: bool = False
    starts: int
    metrics: dict[str, HistoryMetric]
    values: dict[str, list[list[float]]]
    """By metric: the rounds of each start."""
    stock_values: dict[str, list[list[float]]] = Field(default_factory=dict)
    suspects: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class RollingView:
    """The last runs beside the frozen level; regressed ones are counted and left out of the median."""

    metric: str
    frozen: float
    median: float | None
    runs: int
    left_out: int
    trend: tuple[float, ...]
    """The level of every run, oldest first, regressed ones too."""

    @property
    def drift(self) -> float | None:
        """The rolling median against the frozen level, relative."""
        return None if self.median is None else self.median / self.frozen - 1


def frozen_id(frozen: Frozen) -> str:
    """Names what runs are judged against: other measured rounds have another history."""
    parts = {
        "args": frozen.engine_args,
        "budget": frozen.reuse_budget.to_json() if frozen.reuse_budget else None,
        "workload": frozen.workload_sha256,
        "measured": frozen.measured.to_json(),
    }
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def evidence_of(
    metric: str, then: Starts, now: Starts, history: Sequence[HistoryRow], fingerprint: Fingerprint | None = None
) -> Evidence:
    """The evidence of a run with what earlier runs of the same frozen file add to it, oldest first."""
    recent = history[-RECENT_RUNS:]
    earlier = [row.values[metric] for row in recent if row.verdict == "ok" and metric in row.values]
    last: Starts = ()
    if recent and _doubtful(recent[-1], metric):
        changed = [] if fingerprint is None else differences(recent[-1].fingerprint, fingerprint)
        if not changed:
            last = recent[-1].values[metric]
            earlier = earlier[:-1] if recent[-1].verdict == "ok" else earlier
    return Evidence(then, now, last, earlier)


def rolling_view(metric: str, frozen: float, history: Sequence[HistoryRow]) -> RollingView:
    """The last runs of one metric."""
    judged = [row.metrics[metric] for row in history[-RECENT_RUNS:] if metric in row.metrics]
    levels = [m.level for m in judged if m.level is not None]
    sound = [m.level for m in judged if m.level is not None and m.verdict != "regressed"]
    return RollingView(
        metric=metric,
        frozen=frozen,
        median=statistics.median(sound) if sound else None,
        runs=len(levels),
        left_out=len(levels) - len(sound),
        trend=tuple(levels),
    )


def read_history(path: Path, wanted: str | None = None) -> tuple[list[HistoryRow], int]:
    """The runs of a history file with the `frozen_id` wanted, oldest first, and how many lines could not be read.

    A missing file is an empty history. FileFormatError when the file holds lines and none is ours, or one is of an
    earlier chunktune. A line that a kill cut off is only counted.
    """
    if not path.exists():
        return [], 0
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from None
    rows: list[HistoryRow] = []
    for line in lines:
        try:
            value = orjson.loads(line)
            if isinstance(value, dict) and value.get("schema") == "chunktune.night/1":
                raise FileFormatError(
                    f"{path} holds rows of an earlier chunktune (schema 'chunktune.night/1')",
                    "Name another file with --history; this one is left as it is.",
                )
            rows.append(HistoryRow.model_validate(value))
        except (orjson.JSONDecodeError, ValidationError):
            continue
    if lines and not rows:
        raise FileFormatError(
            f"{path} is no history of chunktune (no line has the schema {HISTORY_SCHEMA})", "Name another file."
        )
    return [row for row in rows if wanted in (None, row.frozen_id)], len(lines) - len(rows)


def append_history(path: Path, row: HistoryRow) -> None:
    """Add one line; after a line that a kill cut off, on a new one. FileFormatError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            cut_off = False
            if file.tell() > 0:
                file.seek(-1, 2)
                cut_off = file.read(1) != b"\n"
            file.write((b"\n" if cut_off else b"") + orjson.dumps(row.to_json(), option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise FileFormatError(f"{path} cannot be written: {error.strerror}", "Name another file.") from None


def _doubtful(row: HistoryRow, metric: str) -> bool:
    judged = row.metrics.get(metric)
    return judged is not None and judged.suspicious and row.verdict in ("ok", "inconclusive") and metric in row.values
