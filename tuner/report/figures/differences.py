"""What differs between settings: contrasts with stock, rounds over the cycles, distributions, trade-offs, knobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.domain.experiment import STOCK_ID, Contrast, Round, SettingId, SettingLine
from tuner.domain.measurement import higher_is_better, metric
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
    lines_trace,
    literal,
    metric_axis,
    rounded,
    value,
)
from tuner.report.numbers import is_better, metric_title, metric_unit, signed_percent
from tuner.report.words import objective_of

MOST_ROWS = 30
MOST_LINES = 24
MOST_QUANTILES = 200
_CHANGES = (-0.9, -0.7, -0.5, -0.3, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
_SECOND_CHOICES = ("itl_ms.p99", "request_throughput", "cold_ttft_ms.p90")


def contrasts(data: ReportData) -> Figure:
    """A forest plot: each setting's change against stock, all rounds and the finals alone."""
    path = data.path
    name = metric_title(path)
    title = f"{name} against stock"
    says = (
        f"Change of {name} against stock with its 95 % interval; "
        f"{'lower' if is_better(path, -1) else 'higher'} is better. An interval across zero shows no difference. "
        "Filled: the finals alone, on which the verdict rests."
    )
    lines = [line for line in data.summary.settings if path in line.vs_stock]
    finals = {line.id: line for line in data.summary.finals if path in line.vs_stock}
    lines += [line for name_, line in finals.items() if all(line.id != other.id for other in lines)]
    if not lines:
        return Figure("contrasts", title, says, absent="no setting was measured beside stock")
    lines.sort(key=lambda line: (line.id not in finals, data.sign * line.vs_stock[path].change))
    if len(lines) > MOST_ROWS:
        says += f" The best {MOST_ROWS} of {len(lines)} are shown."
        lines = lines[:MOST_ROWS]
    searched = [(n, line) for n, line in enumerate(lines) if finals.get(line.id) is not line]
    final = [(n, finals[line.id]) for n, line in enumerate(lines) if line.id in finals]
    traces = [_forest("all rounds", searched, path, MUTED, 0.14), _forest("finals", final, path, ACCENT, -0.14)]
    same = {"type": "line", "xref": "x", "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1}
    layout = {
        "xaxis": _change_axis([side for line in lines for side in _sides(line.vs_stock[path])]),
        "yaxis": axis(
            "",
            autorange="reversed",
            tickvals=list(range(len(lines))),
            ticktext=[literal(line.label, 48) for line in lines],
            zeroline=False,
        ),
        "shapes": [{**same, "line": {"color": INK, "width": 1.2, "dash": "dot"}}],
    }
    rows: list[list[Cell]] = [
        [kind, line.id, line.label, rounded(c.change, 4), *(rounded(side, 4) for side in c.ci95 or (None, None))]
        for kind, group in (("all rounds", searched), ("finals", final))
        for _, line in group
        for c in [line.vs_stock[path]]
    ]
    header = ["part", "setting", "label", "change", "low", "high"]
    height = max(LEAST_HEIGHT, 110 + 30 * len(lines))
    kept = [trace for trace in traces if trace["x"]]
    return Figure("contrasts", title, says, kept, layout, header, rows, height=height, full_width=True)


def _forest(name: str, rows: Sequence[tuple[int, SettingLine]], path: str, colour: str, shift: float) -> Trace:
    """The ratios to stock, on a logarithmic axis, where a half and a double are equally far from equal."""
    found = [line.vs_stock[path] for _, line in rows]
    text = [
        literal(line.label)
        + f"<br>{signed_percent(c.change)}"
        + (f" ({signed_percent(c.ci95[0])} to {signed_percent(c.ci95[1])})" if c.ci95 else "")
        for (_, line), c in zip(rows, found, strict=True)
    ]
    bars = {"type": "data", "symmetric": False, "thickness": 1.4, "width": 4, "color": colour}
    high, low = [_sides(c)[1] - 1 - c.change for c in found], [1 + c.change - _sides(c)[0] for c in found]
    return lines_trace(
        name,
        [1 + c.change for c in found],
        [n + shift for n, _ in rows],
        colour,
        f"{name}: %{{text}}",
        mode="markers",
        text=text,
        error_x={**bars, "array": high, "arrayminus": low},
        marker={"color": colour, "size": 8, "symbol": "circle" if name == "finals" else "circle-open"},
    )


def _sides(contrast: Contrast) -> tuple[float, float]:
    """The interval as ratios; the value itself where there is none."""
    low, high = contrast.ci95 or (contrast.change, contrast.change)
    return max(1 + low, 0.01), 1 + high


def _change_axis(ratios: Sequence[float]) -> dict[str, object]:
    """Ratios on a log axis, labelled as changes; stock's tick is always among them."""
    low, high = math.log(min(*ratios, 0.95)), math.log(max(*ratios, 1.05))
    ticks: list[float] = []
    for change in sorted(_CHANGES, key=abs):
        at = math.log1p(change)
        if low <= at <= high and all(abs(at - math.log1p(tick)) > (high - low) / 12 for tick in ticks):
            ticks.append(change)
    edge = (high - low) * 0.04
    return axis(
        "change against stock",
        type="log",
        tickangle=0,
        range=[(low - edge) / math.log(10), (high + edge) / math.log(10)],
        tickvals=[1 + change for change in ticks],
        ticktext=[signed_percent(change) for change in ticks],
    )


def rounds_by_cycle(data: ReportData) -> Figure:
    """The objective of each round in the order of the cycles: drift and disagreement show here."""
    path = data.path
    title = f"{metric_title(path)} of each round"
    says = "A line is a setting within one engine start. Lines that rise or fall together are a drift of the machine."
    by_line: dict[tuple[SettingId, int], list[Round]] = {}
    for row in data.results.kept():
        if metric(row.measurement, path) is not None:
            by_line.setdefault((row.setting, row.start), []).append(row)
    if not by_line:
        return Figure("rounds", title, says, absent="no round has a value of the objective")
    labels = {line.id: line.label for line in data.summary.settings}
    order = sorted(by_line, key=lambda key: not data.colour_role(key[0]))[:MOST_LINES]
    traces: list[Trace] = []
    rows: list[list[Cell]] = []
    for setting, start in reversed(order):
        points = [(r.cycle + 1, metric(r.measurement, path)) for r in by_line[setting, start]]
        role, label = data.colour_role(setting), labels.get(setting, str(setting))
        colour = {"stock": INK, "compared": ACCENT}.get(role, SOFT)
        x, y = zip(*points, strict=True)
        shown = bool(role) and start == min(s for name, s in order if name == setting)
        hover = f"{literal(label)}, start {start}<br>cycle %{{x}}: %{{y:.1f}} {metric_unit(path)}"
        width = {"width": 2 if role else 1}
        traces.append(lines_trace(literal(label, 28), x, y, colour, hover, line=width, showlegend=shown))
        rows += [[setting, start, cycle, rounded(number)] for cycle, number in points]
    values = [y for trace in traces for y in trace["y"]]
    layout = {"xaxis": axis("cycle", rangemode="tozero"), "yaxis": metric_axis(path, values)}
    return Figure("rounds", title, says, traces, layout, ["setting", "start", "cycle", path], rows)


def ttft_distribution(data: ReportData) -> Figure:
    """The share of requests served within a time: stock and the setting compared with it."""
    where = "the finals" if data.results.numbers("final") else "the search"
    title = "Distribution of TTFT"
    says = f"Share of measured requests of {where} whose first token came within a time; further left is better."
    shown = [(line, colour) for line, colour in ((data.stock, INK), (data.compared, ACCENT)) if line is not None]
    shown = [(line, colour) for line, colour in shown if data.ttfts_ms.get(line.id)]
    if not shown:
        return Figure("ttft-distribution", title, says, absent="no single requests of stock or winner were kept")
    traces: list[Trace] = []
    rows: list[list[Cell]] = []
    for line, colour in shown:
        points = _curve(data.ttfts_ms[line.id])
        x, y = zip(*points, strict=True)
        hover = f"{literal(line.label)}<br>%{{y:.0%}} within %{{x:.0f}} ms"
        traces.append(lines_trace(literal(line.label, 34), x, y, colour, hover, mode="lines", line={"width": 2}))
        rows += [[line.id, *point] for point in points]
    layout = {
        "xaxis": axis("TTFT, ms", rangemode="tozero"),
        "yaxis": axis("share of requests", tickformat=".0%", range=[0, 1.02]),
    }
    return Figure("ttft-distribution", title, says, traces, layout, ["setting", "ttft_ms", "share"], rows)


def _curve(ttfts_ms: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(ttfts_ms)
    n = len(ordered)
    ranks = sorted({round((n - 1) * i / (MOST_QUANTILES - 1)) for i in range(MOST_QUANTILES)})
    return [(round(ordered[r], 2), round((r + 1) / n, 4)) for r in ranks]


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
    first, second = data.path, _second(data)
    title = "Pareto front"
    if second is None:
        return Figure("pareto", title, "", absent="no setting has two metrics to set against each other")
    names = [metric_title(path) for path in (first, second)]
    says = f"{names[0]} against {names[1]}; on the line, one cannot improve without the other getting worse."
    dots = [
        (s, x, y)
        for s in data.summary.settings
        if (x := value(s, first)) is not None and (y := value(s, second)) is not None
    ]
    if len(dots) < 2:
        return Figure("pareto", title, says, absent=f"fewer than two settings have both {names[0]} and {names[1]}")
    allowed = [dot for dot in dots if _feasible(dot[0])] or dots
    signs = [-1.0 if higher_is_better(path) else 1.0 for path in (first, second)]
    front = [allowed[i] for i in pareto_front([(signs[0] * x, signs[1] * y) for _, x, y in allowed])]
    on_front = {line.id for line, _, _ in front}
    rest = [dot for dot in dots if dot[0].id not in on_front]
    hover = f"%{{text}}<br>{names[0]} %{{x:.1f}} {metric_unit(first)}<br>{names[1]} %{{y:.1f}} {metric_unit(second)}"
    step = {"width": 1.6, "shape": "hv"}
    traces = [
        _dots("measured", [d for d in rest if _feasible(d[0])], hover, {"color": SOFT, "size": 7}),
        _dots(
            "breaks a limit",
            [d for d in rest if not _feasible(d[0])],
            hover,
            {"color": MUTED, "size": 7, "symbol": "circle-open"},
        ),
        _dots("front", front, hover, {"color": ACCENT, "size": 8})
        | {"mode": "lines+markers"}
        | {"line": {"color": ACCENT, **step}},
        _dots(
            "winner",
            [d for d in dots if d[0].id == data.summary.winner],
            hover,
            {"color": INK, "size": 15, "symbol": "circle-open", "line": {"width": 2}},
        ),
        _dots("stock", [d for d in dots if d[0].id == STOCK_ID], hover, {"color": INK, "size": 8, "symbol": "diamond"}),
    ]
    rows: list[list[Cell]] = [
        [s.id, s.label, rounded(s.p_feasible), rounded(x), rounded(y), "yes" if s.id in on_front else ""]
        for s, x, y in dots
    ]
    layout = {
        "xaxis": metric_axis(first, [x for _, x, _ in dots]),
        "yaxis": metric_axis(second, [y for _, _, y in dots]),
    }
    header = ["setting", "label", "p_feasible", first, second, "on_front"]
    return Figure("pareto", title, says, [t for t in traces if t["x"]], layout, header, rows)


def _feasible(line: SettingLine) -> bool:
    return line.p_feasible is None or line.p_feasible >= 0.5


def _second(data: ReportData) -> str | None:
    paths = [*objective_of(data.study).metrics[1:], *_SECOND_CHOICES]
    measured = (p for p in paths if p != data.path and any(value(s, p) is not None for s in data.summary.settings))
    return next(measured, None)


def _dots(name: str, dots: list[tuple[SettingLine, float, float]], hover: str, marker: dict[str, object]) -> Trace:
    x, y = [x for _, x, _ in dots], [y for _, _, y in dots]
    text = [literal(line.label) for line, _, _ in dots]
    return lines_trace(name, x, y, SOFT, hover, mode="markers", marker=marker, text=text)


def importance(data: ReportData) -> Figure:
    """How much of the objective's spread each knob explains."""
    title, says = "Importance of each knob", "Share of the objective's variation between settings that a knob explains."
    shares = sorted((data.importances or {}).items(), key=lambda item: item[1])
    if len(shares) < 2:
        why = "the space has one knob" if shares else data.importances_reason or "too few settings to tell"
        return Figure("importance", title, says, absent=why)
    trace: Trace = {
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
    layout = {
        "xaxis": axis("share", tickformat=".0%", range=[0, max(1.0, max(s for _, s in shares) * 1.1)]),
        "yaxis": {"type": "category", "automargin": True},
        "showlegend": False,
        "bargap": 0.45,
    }
    rows: list[list[Cell]] = [[name, rounded(share, 4)] for name, share in reversed(shares)]
    height = max(LEAST_HEIGHT - 80, 110 + 34 * len(shares))
    return Figure("importance", title, says, [trace], layout, ["knob", "importance"], rows, height=height)
