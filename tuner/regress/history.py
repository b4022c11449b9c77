"""The nights so far: JSON lines that only grow, and what tonight may take from them.

The baseline never comes from here. Earlier nights say how far starts lie apart (only nights that were
ok), and the last one may be judged together with tonight. So broken nights cannot become the new normal.
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
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Interval
from tuner.domain.experiment import Fingerprint
from tuner.errors import FileFormatError
from tuner.freeze.fingerprint import differences
from tuner.regress.spread import Starts
from tuner.regress.verdict import Evidence, MetricVerdict, Word

NIGHT_SCHEMA: Final = "chunktune.night/1"
CALM_NIGHTS = 14
"""Nights that the spread and the rolling view look back on."""


class NightMetric(Document):
    """One metric of one night, as it was judged."""

    baseline: float | None
    now: float | None
    change: float | None
    ci95: Interval | None
    verdict: Word
    gate: bool
    suspicious: bool = False

    @classmethod
    def of(cls, metric: MetricVerdict) -> NightMetric:
        """What of a verdict goes into the history."""
        return cls(**{name: getattr(metric, name) for name in cls.model_fields})


class Night(Document):
    """One line of the history."""

    schema_: Literal["chunktune.night/1"] = Field(default=NIGHT_SCHEMA, alias="schema")
    at: str
    baseline_id: str
    verdict: Word
    fingerprint: Fingerprint
    simulated: bool = False
    starts: int
    metrics: dict[str, NightMetric]
    values: dict[str, list[list[float]]]
    """By metric: the rounds of each start."""
    control_values: dict[str, list[list[float]]] = Field(default_factory=dict)
    suspects: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class RollingView:
    """The last nights beside the frozen baseline; broken nights are counted and left out of the median."""

    metric: str
    baseline: float
    median: float | None
    nights: int
    left_out: int
    trend: tuple[float, ...]
    """Every night's value, oldest first, broken ones too."""

    @property
    def drift(self) -> float | None:
        """The rolling median against the frozen baseline, relative."""
        return None if self.median is None else self.median / self.baseline - 1


def baseline_id(frozen: Frozen) -> str:
    """Names a baseline with its configuration and load; another baseline has another history."""
    parts = {
        "args": frozen.engine_args,
        "budget": frozen.reuse_budget.to_json() if frozen.reuse_budget else None,
        "workload": frozen.workload_sha256,
        "baseline": frozen.baseline.to_json(),
    }
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def evidence_of(
    metric: str, baseline: Starts, tonight: Starts, nights: Sequence[Night], fingerprint: Fingerprint | None = None
) -> Evidence:
    """Tonight's evidence with what the nights of the same baseline add to it, oldest first."""
    recent = nights[-CALM_NIGHTS:]
    calm = [n.values[metric] for n in recent if n.verdict == "ok" and metric in n.values]
    last: Starts = ()
    if recent and _doubtful(recent[-1], metric):
        changed = [] if fingerprint is None else differences(recent[-1].fingerprint, fingerprint)
        if not changed:
            last = recent[-1].values[metric]
            calm = calm[:-1] if recent[-1].verdict == "ok" else calm
    return Evidence(baseline, tonight, last, calm)


def rolling_view(metric: str, baseline: float, nights: Sequence[Night]) -> RollingView:
    """The last nights of one metric."""
    judged = [n.metrics[metric] for n in nights[-CALM_NIGHTS:] if metric in n.metrics]
    values = [m.now for m in judged if m.now is not None]
    sound = [m.now for m in judged if m.now is not None and m.verdict != "regressed"]
    return RollingView(
        metric=metric,
        baseline=baseline,
        median=statistics.median(sound) if sound else None,
        nights=len(values),
        left_out=len(values) - len(sound),
        trend=tuple(values),
    )


def read_nights(path: Path, wanted_baseline: str | None = None) -> tuple[list[Night], int]:
    """The nights of a history file, oldest first, and how many lines could not be read.

    A missing file is an empty history. FileFormatError when the file holds lines and none is ours. A line
    that a kill cut off is counted, never in the way.
    """
    if not path.exists():
        return [], 0
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from None
    nights: list[Night] = []
    damaged = 0
    for line in lines:
        try:
            nights.append(Night.model_validate(orjson.loads(line)))
        except (orjson.JSONDecodeError, ValidationError):
            damaged += 1
    if lines and not nights:
        raise FileFormatError(
            f"{path} is no history of chunktune (no line has the schema {NIGHT_SCHEMA})", "Name another file."
        )
    return [n for n in nights if wanted_baseline in (None, n.baseline_id)], damaged


def append_night(path: Path, night: Night) -> None:
    """Add one line; after a line that a kill cut off, on a new one. FileFormatError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            cut_off = False
            if file.tell() > 0:
                file.seek(-1, 2)
                cut_off = file.read(1) != b"\n"
            file.write((b"\n" if cut_off else b"") + orjson.dumps(night.to_json(), option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise FileFormatError(f"{path} cannot be written: {error.strerror}", "Name another file.") from None


def _doubtful(night: Night, metric: str) -> bool:
    judged = night.metrics.get(metric)
    return (
        judged is not None and judged.suspicious and night.verdict in ("ok", "inconclusive") and metric in night.values
    )
