"""Memory and utilisation within an engine start, and where the time of the study went."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tuner.domain.experiment import Start
from tuner.domain.observation import MemorySample
from tuner.report.data import ReportData
from tuner.report.figures.base import (
    ACCENT,
    BAD,
    INK,
    LEAST_HEIGHT,
    LINE,
    SOFT,
    Cell,
    Figure,
    Trace,
    axis,
    lines_trace,
    literal,
    rounded,
)
from tuner.report.words import STATE_WORDS

GIB = 2**30
MOST_POINTS = 400
"""Of a round: what a screen shows."""


def memory_over_time(data: ReportData) -> Figure:
    """Used memory of the fullest device over one start."""
    says = "The fullest device in one engine start, its rounds end to end. vLLM allocates its KV pool at the start."
    y_axis = axis("GiB used")
    return _over_a_start(data, "memory-over-time", "Memory over time", says, y_axis, lambda s: s.used_bytes / GIB)


def utilisation_over_time(data: ReportData) -> Figure:
    """How busy the busiest device was over the same start."""
    says = "The busiest device in the same engine start."
    y_axis = axis("busy", tickformat=".0%", range=[0, 1.05])
    return _over_a_start(
        data, "utilisation-over-time", "GPU utilisation over time", says, y_axis, lambda s: s.utilization
    )


def _over_a_start(
    data: ReportData,
    key: str,
    title: str,
    says: str,
    y_axis: dict[str, object],
    read: Callable[[MemorySample], float | None],
) -> Figure:
    """`read` gives the value of a sample; the largest over the devices is drawn, a line a setting."""
    finals = [n for n in data.results.numbers("final") if data.timelines.get(n)]
    start = next(iter(finals or sorted(data.timelines, reverse=True)), None)
    if start is None:
        return Figure(key, title, says, absent="no samples of memory or utilisation were kept")
    labels = {line.id: line.label for line in data.summary.settings}
    by_setting: dict[str, tuple[list[float | None], list[float | None], str]] = {}
    rows: list[list[Cell]] = []
    now = 0.0
    for round_ in data.results.kept(starts=[start]):
        timeline = data.timelines[start].get(round_.round)
        points = _largest(timeline.samples if timeline is not None else [], read)
        if not points:
            continue
        role = data.colour_role(round_.setting)
        colour = {"stock": INK, "compared": ACCENT}.get(role, SOFT)
        x, y, _ = by_setting.setdefault(labels.get(round_.setting, str(round_.setting)), ([], [], colour))
        # An empty point ends the line, so that rounds of other settings between are not crossed.
        x += [*(round(now + second, 2) for second, _ in points), None]
        y += [*(value for _, value in points), None]
        rows += [[start, round_.round, round_.setting, round(now + second, 2), value] for second, value in points]
        now += points[-1][0]
    if not rows:
        why = next((t.reason for t in data.timelines[start].values() if t.reason), "none of its samples has a value")
        return Figure(key, title, says, absent=why)
    traces = [
        lines_trace(literal(name, 28), x, y, colour, f"{literal(name)}<br>%{{x:.1f}} s: %{{y:.3~g}}", mode="lines")
        for name, (x, y, colour) in by_setting.items()
    ]
    layout = {"xaxis": axis(f"seconds of load in start {start}"), "yaxis": y_axis}
    return Figure(key, title, says, traces, layout, ["start", "round", "setting", "second", "value"], rows)


def _largest(samples: list[MemorySample], read: Callable[[MemorySample], float | None]) -> list[tuple[float, float]]:
    """(second, value) of the largest device at each sampling moment, thinned evenly."""
    by_time: dict[float, float] = {}
    for sample in samples:
        value = read(sample)
        if value is not None:
            by_time[sample.at_s] = max(by_time.get(sample.at_s, 0.0), value)
    points = sorted(by_time.items())
    every = -(-len(points) // MOST_POINTS) or 1
    thinned = [points[i : i + every] for i in range(0, len(points), every)]
    origin = points[0][0] if points else 0.0
    return [(round(group[0][0] - origin, 2), round(max(value for _, value in group), 3)) for group in thinned]


_SPENT = (("engine start", SOFT), ("load", ACCENT), ("stop and overhead", LINE))


def where_time_went(data: ReportData) -> Figure:
    """When each start ran, and on what its time went."""
    title, says = "Where the time went", "Each row is an engine start. Crosses mark those that did not complete."
    timed = [(s, when) for s in data.results.starts if (when := _began(s)) is not None and s.time.total_s > 0]
    if not timed:
        return Figure("time", title, says, absent="no engine start has a time")
    origin = min(when for _, when in timed)
    rows: list[list[Cell]] = []
    for start, when in timed:
        time = start.time
        rest = max(time.total_s - time.engine_start_s - time.load_s, 0.0)
        spent = ((when - origin).total_seconds(), time.engine_start_s, time.load_s, rest)
        rows.append([start.number, start.label or start.purpose, start.state, *(rounded(s, 1) for s in spent)])
    traces = [_bars(rows, part) for part in range(len(_SPENT))]
    failed = [row for row in rows if row[2] != "completed"]
    if failed:
        text = [literal(f"start {row[0]}, {row[1]}: {STATE_WORDS[str(row[2])]}") for row in failed]
        ends = [sum(map(_number, row[3:])) / 60 for row in failed]
        cross = {"color": BAD, "size": 9, "symbol": "x"}
        y = [row[0] for row in failed]
        traces.append(lines_trace("not completed", ends, y, BAD, "%{text}", mode="markers", marker=cross, text=text))
    layout = {
        "barmode": "overlay",
        "bargap": 0.3,
        "xaxis": axis("minutes since the first start"),
        "yaxis": axis("start", autorange="reversed", dtick=1 if len(rows) <= 50 else None, zeroline=False),
    }
    header = ["start", "label", "state", "began_s", "engine_start_s", "load_s", "rest_s"]
    height = min(max(LEAST_HEIGHT - 100, 110 + 26 * len(rows)), 1200)
    return Figure("time", title, says, traces, layout, header, rows, height=height, full_width=True)


def _bars(rows: list[list[Cell]], part: int) -> Trace:
    name, colour = _SPENT[part]
    lengths = [_number(row[4 + part]) for row in rows]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [row[0] for row in rows],
        "x": [length / 60 for length in lengths],
        "base": [sum(map(_number, row[3 : 4 + part])) / 60 for row in rows],
        "marker": {"color": colour, "line": {"width": 0}},
        "text": [literal(str(row[1])) for row in rows],
        "textposition": "none",
        "customdata": lengths,
        "hovertemplate": f"start %{{y}}, %{{text}}<br>{name}: %{{customdata:.0f}} s<extra></extra>",
    }


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


def _began(start: Start) -> datetime | None:
    try:
        return datetime.fromisoformat(start.started_at)
    except ValueError:
        return None
