"""How the scheduling variants spread their TTFT, and how busy the devices were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.domain.experiment import Trial
from tuner.report.answer import objective_of, trial_label
from tuner.report.data import ReportData
from tuner.report.figures.base import (
    ACCENT,
    INK,
    MUTED,
    SOFT,
    Cell,
    Figure,
    Trace,
    axis,
    literal,
    rounded,
    value,
)
from tuner.report.numbers import percent

MOST_QUANTILES = 200
_THRESHOLD = "long_prefill_token_threshold"
_LONG_PREFILL, _REUSE_BUDGET = "long-prefill threshold", "reuse budget"


def variants(data: ReportData) -> list[tuple[str, Trial, str, str]]:
    """(name, trial, colour, dash): stock, the best of each scheduling variant that was measured, the winner."""
    found: list[tuple[str, Trial, str, str]] = []

    def add(name: str, trial: Trial | None, colour: str, dash: str) -> None:
        if trial is None or trial.median is None or any(trial.number == t.number for _, t, _, _ in found):
            return
        won = trial.number == data.summary.best and name != "winner"
        found.append((f"{name} (winner)" if won else name, trial, ACCENT if won else colour, dash))

    add("stock", data.baseline, INK, "solid")
    add(_LONG_PREFILL, _best(data, lambda t: bool(t.knobs.get(_THRESHOLD)) and not t.reuse_budget), SOFT, "dash")
    add(_REUSE_BUDGET, _best(data, lambda t: t.reuse_budget is not None), MUTED, "dot")
    add("winner", data.winner, ACCENT, "solid")
    return found


def _best(data: ReportData, belongs: Callable[[Trial], bool]) -> Trial | None:
    objective = objective_of(data.study)
    path, sign = objective.metrics[0], objective.signs[0]
    scored = [
        (sign * y, t.number, t) for t in data.configurations() if belongs(t) and (y := value(t, path)) is not None
    ]
    return min(scored)[2] if scored else None


def ttft_distributions(data: ReportData) -> Figure:
    """The share of requests served within a time, one curve per variant."""
    title = "Distribution of TTFT by scheduling variant"
    shown = [(v, data.ttfts_ms[v[1].number]) for v in variants(data) if data.ttfts_ms.get(v[1].number)]
    if not shown:
        return Figure("ttft-distribution", title, "", absent="no trial's single requests were kept")
    missing = [name for name in (_LONG_PREFILL, _REUSE_BUDGET) if not any(v[0].startswith(name) for v, _ in shown)]
    says = "Share of measured requests whose first token came within a time; steeper and further left is better." + (
        f" Not in this study: {', '.join(missing)}." if missing else ""
    )
    traces: list[Trace] = []
    rows: list[list[Cell]] = []
    for (name, trial, colour, dash), ttfts in shown:
        points = _curve(ttfts)
        busy = value(trial, "gpu_utilization.mean")
        label = literal(f"{name}: trial {trial.number}, {trial_label(trial)}")
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "line": {"color": colour, "width": 2.4 if colour == ACCENT else 1.6, "dash": dash},
                "hovertemplate": f"{label}<br>%{{y:.0%}} within %{{x:.0f}} ms"
                f"<br>GPU busy {percent(busy)}<extra></extra>",
            }
        )
        rows += [[name, trial.number, x, y] for x, y in points]
    layout = {
        "xaxis": axis("TTFT, ms", rangemode="tozero"),
        "yaxis": axis("share of requests", tickformat=".0%", range=[0, 1.02]),
    }
    return Figure("ttft-distribution", title, says, traces, layout, ["variant", "trial", "ttft_ms", "share"], rows)


def _curve(ttfts_ms: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(ttfts_ms)
    n = len(ordered)
    ranks = sorted({round((n - 1) * i / (MOST_QUANTILES - 1)) for i in range(MOST_QUANTILES)})
    return [(round(ordered[r], 2), round((r + 1) / n, 4)) for r in ranks]


def utilization(data: ReportData) -> Figure:
    """Mean device utilisation of the same variants."""
    title, says = "GPU utilisation by scheduling variant", "Mean over the measured part of the rounds and over devices."
    shown = [(v, busy) for v in variants(data) if (busy := value(v[1], "gpu_utilization.mean")) is not None]
    if not shown:
        return Figure("utilization", title, says, absent="no device utilisation was measured")
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [name for (name, *_), _ in shown],
            "x": [busy for _, busy in shown],
            "text": [percent(busy) for _, busy in shown],
            "textposition": "outside",
            "cliponaxis": False,
            "customdata": [literal(f"trial {t.number}, {trial_label(t)}") for (_, t, _, _), _ in shown],
            "marker": {"color": [ACCENT if colour == ACCENT else SOFT for (_, _, colour, _), _ in shown]},
            "hovertemplate": "%{customdata}<br>%{x:.1%}<extra></extra>",
        }
    ]
    layout = {
        "xaxis": axis("busy", tickformat=".0%", range=[0, 1.12], tickvals=[0, 0.25, 0.5, 0.75, 1]),
        "yaxis": {"type": "category", "autorange": "reversed"},
        "showlegend": False,
        "bargap": 0.45,
    }
    rows: list[list[Cell]] = [[name, t.number, rounded(busy)] for (name, t, _, _), busy in shown]
    return Figure("utilization", title, says, traces, layout, ["variant", "trial", "gpu_utilization"], rows)
