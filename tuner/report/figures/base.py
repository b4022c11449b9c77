"""A figure: what plotly draws, and the same numbers as a table to copy. Pure.

Colours are names (`@accent`, `@ink`, `@muted`, `@soft`, `@line`, `@bad`) that the page replaces by those
of the light or the dark theme when it draws, so that one page serves both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.domain.experiment import SettingLine
from tuner.domain.measurement import metric
from tuner.report.numbers import metric_title, metric_unit

Cell = str | int | float | None
Trace = dict[str, Any]

ACCENT, INK, MUTED, SOFT, LINE, BAD = "@accent", "@ink", "@muted", "@soft", "@line", "@bad"
LEAST_HEIGHT = 340
WIDE_SPREAD = 6.0
"""Ratio of largest to smallest value from which an axis is logarithmic."""
MOST_TICKS = 11
MOST_LABELLED = 40
"""Settings up to which each is drawn as a labelled line or row; beyond, points."""


@dataclass(frozen=True)
class Figure:
    """One figure of the report; `absent` says why there is none."""

    key: str
    title: str
    says: str
    """A sentence on how to read it."""
    traces: list[Trace] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    header: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    absent: str = ""
    height: int = LEAST_HEIGHT
    full_width: bool = False

    @property
    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {"key": self.key, "data": self.traces, "layout": {**self.layout, "height": self.height}}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title}, **more}


def log_axis(title: str, values: Iterable[float], **more: Any) -> dict[str, Any]:
    """A log axis for chunk sizes, with a tick at each measured value that has room, powers of two first."""
    measured = sorted(set(values))
    room = math.log(measured[-1] / measured[0]) / MOST_TICKS
    ticks: list[float] = []
    for size in sorted(measured, key=lambda v: not math.log2(v).is_integer()):
        if all(abs(math.log(size / tick)) > room for tick in ticks):
            ticks.append(size)
    return axis(title, type="log", tickangle=0, tickvals=ticks, ticktext=[f"{t:g}" for t in ticks], **more)


def metric_axis(path: str, values: Sequence[float], title: str = "") -> dict[str, Any]:
    """An axis for a metric, named with its unit; logarithmic where the values lie far apart, else from 0."""
    unit = metric_unit(path)
    name = title or metric_title(path)
    label = f"{name}, {unit}" if unit and unit != "%" else name
    shares = {"tickformat": ".0%"} if unit == "%" else {}
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low <= 0 or high / low <= WIDE_SPREAD:
        return axis(label, rangemode="tozero", **shares)
    steps = (1, 2, 5) if high / low < 500 else (1,)
    marks = (m * 10.0**e for e in range(-3, 9) for m in steps)
    ticks = [t for t in marks if low / 1.5 <= t <= high * 1.5]
    return axis(label, type="log", tickvals=ticks, ticktext=[f"{t:,g}" for t in ticks])


def value(line: SettingLine, path: str) -> float | None:
    """The setting's median at a metric path."""
    return None if line.median is None else metric(line.median, path)


def lines_trace(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, hover: str, **more: Any) -> Trace:
    """A line with markers; `line` and `mode` among `more` are laid over its own."""
    line = {"color": colour, "width": 1.6, **more.pop("line", {})}
    base = {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y), "line": line}
    return {**base, "marker": {"color": colour, "size": 6}, "hovertemplate": f"{hover}<extra></extra>", **more}


def error_bars(lines: Sequence[SettingLine], path: str) -> dict[str, Any] | None:
    """Plotly's asymmetric error bars from the settings' 95 % intervals; None when none has any."""
    above: list[float] = []
    below: list[float] = []
    for line in lines:
        middle, interval = value(line, path), line.ci95.get(path)
        low, high = interval if interval is not None and middle is not None else (0.0, 0.0)
        above.append(0.0 if middle is None or interval is None else max(high - middle, 0.0))
        below.append(0.0 if middle is None or interval is None else max(middle - low, 0.0))
    if not any(above) and not any(below):
        return None
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 4}


def literal(text: str, limit: int = 60) -> str:
    """Text that plotly shows as it is: it would read tags and entities in names, so they are spelt out."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def rounded(number: float | None, digits: int = 3) -> float | None:
    """For the copyable data: enough digits, no noise."""
    return None if number is None else round(number, digits)
