"""What the search found: the trade-off, and which knobs mattered."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.measurement import higher_is_better
from tuner.domain.experiment import Trial
from tuner.report.answer import objective_of, trial_label
from tuner.report.data import ReportData
from tuner.report.figures.base import (
    ACCENT,
    INK,
    LEAST_HEIGHT,
    MUTED,
    SOFT,
    Cell,
    Figure,
    Trace,
    axis,
    literal,
    metric_axis,
    rounded,
    value,
)
from tuner.report.numbers import metric_title, metric_unit

_SECOND_CHOICES = ("itl_ms.p99", "request_throughput", "cold_ttft_ms.p90")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both (both minimized), by rising first value."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front


def pareto(data: ReportData) -> Figure:
    """The objective against the second one, or against what is usually paid for it."""
    metrics = objective_of(data.study).metrics
    first = metrics[0]
    second = metrics[1] if len(metrics) > 1 else _second(data.configurations(), first)
    title = "Pareto front"
    if second is None:
        return Figure("pareto", title, "", absent="no trial has two metrics to set against each other")
    names = [metric_title(p) for p in (first, second)]
    says = f"{names[0]} against {names[1]}; on the line, one cannot improve without the other getting worse."
    dots = [
        (t, x, y)
        for t in data.configurations()
        if (x := value(t, first)) is not None and (y := value(t, second)) is not None
    ]
    if len(dots) < 2:
        return Figure("pareto", title, says, absent=f"fewer than two trials have both {names[0]} and {names[1]}")
    allowed = [d for d in dots if not d[0].violations] or dots
    signs = [-1.0 if higher_is_better(p) else 1.0 for p in (first, second)]
    front = [allowed[i] for i in pareto_front([(signs[0] * x, signs[1] * y) for _, x, y in allowed])]
    on_front = {t.number for t, _, _ in front}
    inside = [d for d in dots if not d[0].violations and d[0].number not in on_front]
    outside = [d for d in dots if d[0].violations and d[0].number not in on_front]
    template = f"%{{text}}<br>{names[0]} %{{x:.1f}} {metric_unit(first)}<br>{names[1]} %{{y:.1f}} {metric_unit(second)}"
    traces = [
        _dots("measured", inside, template, {"color": SOFT, "size": 7}),
        _dots("outside the constraints", outside, template, {"color": MUTED, "size": 7, "symbol": "circle-open"}),
        {
            **_dots("front", front, template, {"color": ACCENT, "size": 8}),
            "mode": "lines+markers",
            "line": {"color": ACCENT, "width": 1.6, "shape": "hv"},
        },
        _dots(
            "winner",
            [d for d in dots if d[0].number == data.summary.best],
            template,
            {"color": INK, "size": 15, "symbol": "circle-open", "line": {"width": 2}},
        ),
    ]
    rows: list[list[Cell]] = [
        [
            t.number,
            trial_label(t),
            "; ".join(t.violations),
            rounded(x),
            rounded(y),
            "yes" if t.number in on_front else "",
        ]
        for t, x, y in dots
    ]
    layout = {
        "xaxis": metric_axis(first, [x for _, x, _ in dots]),
        "yaxis": metric_axis(second, [y for _, _, y in dots]),
    }
    header = ["trial", "configuration", "violations", first, second, "on_front"]
    return Figure("pareto", title, says, [t for t in traces if t["x"]], layout, header, rows)


def _second(trials: Sequence[Trial], first: str) -> str | None:
    for path in _SECOND_CHOICES:
        if path != first and any(value(t, path) is not None for t in trials):
            return path
    return None


def _dots(name: str, dots: list[tuple[Trial, float, float]], template: str, marker: dict[str, object]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [x for _, x, _ in dots],
        "y": [y for _, _, y in dots],
        "text": [literal(f"trial {t.number}, {trial_label(t)}") for t, _, _ in dots],
        "marker": marker,
        "hovertemplate": f"{template}<extra></extra>",
    }


def importance(data: ReportData) -> Figure:
    """How much of the objective's spread each knob explains."""
    title, says = "Importance of each knob", "Share of the objective's variation between trials that a knob explains."
    shares = sorted((data.importances or {}).items(), key=lambda item: item[1])
    if not shares:
        why = data.importances_reason or "too few trials or knobs to tell"
        return Figure("importance", title, says, absent=why)
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [literal(name, 34) for name, _ in shares],
            "x": [share for _, share in shares],
            "text": [f"{share:.0%}" for _, share in shares],
            "textposition": "outside",
            "cliponaxis": False,
            "marker": {"color": [SOFT] * (len(shares) - 1) + [ACCENT]},
            "hovertemplate": "%{y}: %{x:.1%}<extra></extra>",
        }
    ]
    layout = {
        "xaxis": axis("share", tickformat=".0%", range=[0, max(1.0, max(s for _, s in shares) * 1.1)]),
        "yaxis": {"type": "category", "automargin": True},
        "showlegend": False,
        "bargap": 0.45,
    }
    rows: list[list[Cell]] = [[name, rounded(share, 4)] for name, share in reversed(shares)]
    height = max(LEAST_HEIGHT - 80, 110 + 34 * len(shares))
    return Figure("importance", title, says, traces, layout, ["knob", "importance"], rows, height=height)
