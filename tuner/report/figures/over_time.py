"""Memory within a round, P90 from round to round, and where the sweep's hours went."""

from __future__ import annotations

from datetime import datetime

from tuner.domain.measurement import metric
from tuner.domain.observation import MemoryTimeline
from tuner.domain.experiment import Trial
from tuner.report.answer import STATE_WORDS, objective_of, trial_label
from tuner.report.data import ReportData
from tuner.report.figures.base import (
    ACCENT,
    BAD,
    INK,
    LEAST_HEIGHT,
    LINE,
    MUTED,
    SOFT,
    Cell,
    Figure,
    Trace,
    axis,
    literal,
    metric_axis,
    rounded,
)
from tuner.report.figures.by_chunk import GIB
from tuner.report.numbers import metric_title, metric_unit

MOST_POINTS = 600
MOST_LINES = 24


def memory_over_time(data: ReportData) -> Figure:
    """One round of the winner (or baseline) against one without chunked prefill."""
    title = "Memory over time, with and without chunked prefill"
    chosen = [(name, t, colour) for name, t, colour in _with_and_without(data) if data.timelines.get(t.number)]
    if not chosen:
        return Figure("memory-over-time", title, "", absent="no memory samples were kept")
    alone = not any(name.startswith("without") for name, _, _ in chosen)
    says = "The fullest device in one round of each" + (
        "; the study has no reference without chunked prefill." if alone else "."
    )
    traces: list[Trace] = []
    rows: list[list[Cell]] = []
    for name, trial, colour in chosen:
        round_number, timeline = data.timelines[trial.number][0]
        points = _fullest(timeline)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "line": {"color": colour, "width": 1.8},
                "hovertemplate": literal(f"trial {trial.number}, {trial_label(trial)}, round {round_number}")
                + "<br>%{x:.1f} s: %{y:.2f} GiB<extra></extra>",
            }
        )
        rows += [[trial.number, round_number, x, y] for x, y in points]
    if not rows:
        return Figure("memory-over-time", title, says, absent="the memory timelines are empty")
    layout = {"xaxis": axis("seconds into the round"), "yaxis": axis("GiB used")}
    return Figure("memory-over-time", title, says, traces, layout, ["trial", "round", "second", "gib"], rows)


def _with_and_without(data: ReportData) -> list[tuple[str, Trial, str]]:
    without = next((t for t in data.configurations() if t.engine_args.get("enable_chunked_prefill") is False), None)
    names = [("with chunked prefill", data.winner, ACCENT), ("stock", data.baseline, MUTED)]
    found: list[tuple[str, Trial, str]] = []
    for name, trial, colour in names:
        if trial is not None and trial is not without and not any(t.number == trial.number for _, t, _ in found):
            found.append((name, trial, colour))
    return found + ([("without chunked prefill", without, INK)] if without is not None else [])


def _fullest(timeline: MemoryTimeline) -> list[tuple[float, float]]:
    """(second, GiB) of the fullest device at each sampling moment, thinned evenly to what a screen shows."""
    by_time: dict[float, int] = {}
    for sample in timeline.samples:
        by_time[sample.at_s] = max(by_time.get(sample.at_s, 0), sample.used_bytes)
    points = sorted(by_time.items())
    every = -(-len(points) // MOST_POINTS) or 1
    thinned = [points[i : i + every] for i in range(0, len(points), every)]
    origin = points[0][0] if points else 0.0
    return [(round(group[0][0] - origin, 2), round(max(y for _, y in group) / GIB, 3)) for group in thinned]


def trend(data: ReportData) -> Figure:
    """The objective of each round in the order driven: drift and disagreement show here."""
    path = objective_of(data.study).metrics[0]
    name, unit = metric_title(path), metric_unit(path)
    title, says = f"{name} of each round", "Flat lines agree; a slope is a warm-up or a drift that a median would hide."
    lines = [(t, points) for t in _worth_a_line(data) if (points := _rounds(t, path))]
    if not lines:
        return Figure("trend", title, says, absent="no round has a value of the objective")
    traces: list[Trace] = []
    rows: list[list[Cell]] = []
    for trial, points in lines:
        special = trial in (data.winner, data.baseline)
        colour = ACCENT if trial == data.winner else INK if special else SOFT
        label = literal(f"trial {trial.number}, {trial_label(trial)}")
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": literal(trial_label(trial), 28) if special else label,
                "showlegend": special,
                "x": [n for n, _ in points],
                "y": [y for _, y in points],
                "line": {"color": colour, "width": 2.4 if special else 1},
                "marker": {"color": colour, "size": 6 if special else 4},
                "hovertemplate": f"{label}<br>round %{{x}}: %{{y:.1f}} {unit}<extra></extra>",
            }
        )
        rows += [[trial.number, n, rounded(y)] for n, y in points]
    traces.sort(key=lambda trace: bool(trace["showlegend"]))
    layout = {
        "xaxis": axis("round", dtick=1),
        "yaxis": metric_axis(path, [y for _, points in lines for _, y in points]),
    }
    return Figure("trend", title, says, traces, layout, ["trial", "round", path], rows)


def _rounds(trial: Trial, path: str) -> list[tuple[int, float]]:
    return [(n, y) for n, r in enumerate(trial.rounds, 1) if r.void is None and (y := metric(r, path)) is not None]


def _worth_a_line(data: ReportData) -> list[Trial]:
    """Winner and baseline, then the others in order, as many as can be told apart."""
    first = [t for t in (data.baseline, data.winner) if t is not None]
    return [*first, *(t for t in data.configurations() if t not in first)][:MOST_LINES]


_SPENT = (("starting", SOFT), ("load", ACCENT), ("stopping and the rest", LINE))


def sweep_timeline(data: ReportData) -> Figure:
    """When each trial ran, and on what its time went."""
    title, says = "The sweep over time", "Each row is a trial: its start, its load, the rest; failures are marked."
    timed = [(t, when) for t in data.trials if (when := _start(t)) is not None and t.time.total_s > 0]
    if not timed:
        return Figure("sweep", title, says, absent="no trial has a start time")
    origin = min(when for _, when in timed)
    rows: list[list[Cell]] = []
    for trial, when in timed:
        time = trial.time
        rest = max(time.total_s - time.engine_start_s - time.load_s, 0.0)
        began = (when - origin).total_seconds()
        spent = [rounded(s, 1) for s in (began, time.engine_start_s, time.load_s, rest)]
        rows.append([trial.number, trial_label(trial), trial.state, *spent])
    traces = _spent_bars(rows) + _failure_marks([t for t, _ in timed], rows)
    height = min(max(LEAST_HEIGHT, 90 + 20 * len(rows)), 1200)
    rows_axis = axis("trial", autorange="reversed", dtick=1 if len(rows) <= 50 else None, zeroline=False)
    layout = {"barmode": "overlay", "bargap": 0.3, "xaxis": axis("minutes since the first trial"), "yaxis": rows_axis}
    header = ["trial", "configuration", "state", "began_s", "starting_s", "load_s", "rest_s"]
    return Figure("sweep", title, says, traces, layout, header, rows, height=height, full_width=True)


def _spent_bars(rows: list[list[Cell]]) -> list[Trace]:
    traces: list[Trace] = []
    for part, (name, colour) in enumerate(_SPENT):
        lengths = [_seconds(row[4 + part]) for row in rows]
        bases = [sum(_seconds(cell) for cell in row[3 : 4 + part]) for row in rows]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [row[0] for row in rows],
                "x": [length / 60 for length in lengths],
                "base": [base / 60 for base in bases],
                "marker": {"color": colour, "line": {"width": 0}},
                "text": [literal(str(row[1])) for row in rows],
                "textposition": "none",
                "customdata": lengths,
                "hovertemplate": f"trial %{{y}}, %{{text}}<br>{name}: %{{customdata:.0f}} s<extra></extra>",
            }
        )
    return traces


def _failure_marks(trials: list[Trial], rows: list[list[Cell]]) -> list[Trace]:
    failed = [(t, row) for t, row in zip(trials, rows, strict=True) if t.state not in ("completed", "infeasible")]
    failed += [(t, row) for t, row in zip(trials, rows, strict=True) if t.state == "infeasible" and t.median is None]
    if not failed:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "failed",
            "x": [sum(_seconds(cell) for cell in row[3:]) / 60 for _, row in failed],
            "y": [row[0] for _, row in failed],
            "text": [literal(f"{STATE_WORDS[t.state]}: {t.cause or ''}") for t, _ in failed],
            "marker": {"color": BAD, "size": 9, "symbol": "x"},
            "hovertemplate": "trial %{y}<br>%{text}<extra></extra>",
        }
    ]


def _seconds(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


def _start(trial: Trial) -> datetime | None:
    try:
        return datetime.fromisoformat(trial.started_at)
    except ValueError:
        return None
