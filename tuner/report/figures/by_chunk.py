"""Metrics over the chunk size, with stock, the limits, and what cannot run."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.experiment import STOCK_ID, SettingLine
from tuner.domain.setting import CHUNK_KNOB
from tuner.report.data import ReportData
from tuner.report.figures.base import (
    ACCENT,
    BAD,
    INK,
    MOST_LABELLED,
    MUTED,
    SOFT,
    Cell,
    Figure,
    Trace,
    error_bars,
    lines_trace,
    literal,
    log_axis,
    metric_axis,
    rounded,
    value,
)
from tuner.report.numbers import metric_title, metric_unit, metric_value
from tuner.report.words import TTFT_COLUMNS, constraints_of, objective_of

Series = Sequence[tuple[str, str]]
"""Metric paths with their colours; the accented one is the figure's subject."""
_TTFT: Series = (("ttft_ms.p50", SOFT), ("ttft_ms.p90", ACCENT), ("ttft_ms.p99", MUTED))


def ttft_by_chunk(data: ReportData) -> Figure:
    return over_chunk(data, "ttft-by-chunk", "TTFT over chunk size", _TTFT)


def itl_by_chunk(data: ReportData) -> Figure:
    """What decoding pays for large chunks."""
    return over_chunk(
        data, "itl-by-chunk", "Inter-token latency over chunk size", (("itl_ms.p50", SOFT), ("itl_ms.p99", ACCENT))
    )


def others_by_chunk(data: ReportData) -> list[Figure]:
    """What is optimized beside TTFT, the prefix hit rate and the prefill chunks, a figure each."""
    paths = [path for path in objective_of(data.study).metrics if path not in (*TTFT_COLUMNS, "itl_ms.p99")]
    paths += ["prefix_hit_rate", "prefill_chunks_per_request"]
    return [
        over_chunk(data, f"{path.replace('.', '-').replace('_', '-')}-by-chunk", _title(path), ((path, ACCENT),))
        for path in dict.fromkeys(paths)
    ]


def _title(path: str) -> str:
    title = metric_title(path)
    return f"{title[:1].upper()}{title[1:]} over chunk size"


def over_chunk(data: ReportData, key: str, title: str, series: Series) -> Figure:
    """One line a metric over the chunk sizes; stock's level of the accented one, and the limits, lie across."""
    main = next(path for path, colour in series if colour == ACCENT)
    lines = [line for line in one_per_chunk(data) if any(value(line, path) is not None for path, _ in series)]
    says = "Medians of the rounds."
    if not lines:
        return Figure(key, title, says, absent=_why_absent(data, main))
    sizes = [data.chunk_of(line) or 0 for line in lines]
    marked = len(lines) <= MOST_LABELLED
    traces = [_metric_trace(lines, sizes, path, colour, marked=marked) for path, colour in series]
    if any("error_y" in trace for trace in traces):
        says += " Bars are 95 % intervals."
    traces += _winner(data, lines, sizes, main)
    ends = [min(sizes), max(sizes)]
    stock = None if data.stock is None else value(data.stock, main)
    if stock is not None:
        told = f"stock {metric_title(main)}: {metric_value(main, stock)}"
        traces.append(_across("stock", ends, stock, INK, told))
    for constraint in constraints_of(data.study):
        if constraint.metric in dict(series):
            name = f"limit {metric_title(constraint.metric)} {constraint.op} {constraint.limit:g}"
            traces.append(_across(literal(name), ends, constraint.limit, BAD, literal(name)))
    values = [y for trace in traces for y in trace["y"] if y is not None]
    traces += _cannot_run(data, max(values))
    x = [*sizes, *(size for trace in traces for size in trace["x"])]
    rows: list[list[Cell]] = [
        [line.id, size, *(rounded(value(line, path)) for path, _ in series), *map(rounded, line.ci95.get(main, ()))]
        for line, size in zip(lines, sizes, strict=True)
    ]
    header = ["setting", "chunk", *(path for path, _ in series), f"{main} low", f"{main} high"]
    rows = [row + [None] * (len(header) - len(row)) for row in rows]
    y_axis = metric_axis(main, values, metric_title(main) if len(series) == 1 else metric_title(main).split(" ")[0])
    return Figure(key, title, says, traces, {"xaxis": log_axis(CHUNK_KNOB, x), "yaxis": y_axis}, header, rows)


def one_per_chunk(data: ReportData) -> list[SettingLine]:
    """A setting for each chunk size: the one that varies nothing else, or the best where all vary more."""
    sized = [s for s in data.summary.settings if s.id != STOCK_ID and CHUNK_KNOB in s.knobs and s.median is not None]
    plain = [line for line in sized if set(line.knobs) == {CHUNK_KNOB}]
    chosen: dict[int, tuple[float, SettingLine]] = {}
    for line in plain if len({data.chunk_of(line) for line in plain}) >= 2 else sized:
        size, score = data.chunk_of(line), value(line, data.path)
        cost = float("inf") if score is None else data.sign * score
        if size is not None and (size not in chosen or cost < chosen[size][0]):
            chosen[size] = (cost, line)
    return [chosen[size][1] for size in sorted(chosen)]


def _why_absent(data: ReportData, path: str) -> str:
    reasons = [s.median.unmeasured.get(path.partition(".")[0]) for s in data.summary.settings if s.median is not None]
    if len([s for s in data.summary.settings if s.median is not None and data.chunk_of(s) is not None]) == 0:
        return "no chunk size was measured"
    return next((reason for reason in reasons if reason), "not measured for any chunk size")


def _metric_trace(lines: list[SettingLine], sizes: list[int], path: str, colour: str, *, marked: bool) -> Trace:
    stat = path.rpartition(".")[2].upper() if "." in path else metric_title(path)
    trace = lines_trace(
        stat,
        sizes,
        [value(line, path) for line in lines],
        colour,
        f"%{{text}}<br>{stat} %{{y:{'.1%' if metric_unit(path) == '%' else '.1f'}}} {metric_unit(path).strip('%')}",
        mode="lines+markers" if marked else "markers",
        text=[literal(line.label) for line in lines],
        line={"width": 2.4 if colour == ACCENT else 1.4},
        marker={"color": colour, "size": 7 if marked else 4},
    )
    bars = error_bars(lines, path) if marked else None
    return {**trace, "error_y": {**bars, "color": colour}} if bars else trace


def _winner(data: ReportData, lines: list[SettingLine], sizes: list[int], path: str) -> list[Trace]:
    found = [(size, line) for size, line in zip(sizes, lines, strict=True) if line.id == data.summary.winner]
    points = [(size, level) for size, line in found if (level := value(line, path)) is not None]
    if not points:
        return []
    ring = {"color": INK, "size": 15, "symbol": "circle-open", "line": {"width": 2}}
    x, y = [x for x, _ in points], [y for _, y in points]
    return [lines_trace("winner", x, y, INK, "winner", mode="markers", marker=ring)]


def _across(name: str, ends: list[int], level: float, colour: str, told: str) -> Trace:
    dash = {"width": 1.2, "dash": "dot" if colour == INK else "dash"}
    return lines_trace(name, ends, [level, level], colour, told, mode="lines", line=dash)


def _cannot_run(data: ReportData, level: float) -> list[Trace]:
    """Crosses at the top for the chunk sizes that gave no numbers."""
    found = [
        (size, line)
        for line in data.summary.settings
        if line.state in ("infeasible", "failed") and line.median is None and (size := data.chunk_of(line)) is not None
    ]
    if not found:
        return []
    cross = {"color": BAD, "size": 9, "symbol": "x"}
    text = [literal(f"{line.label}: {line.cause or line.state}") for _, line in found]
    x = [size for size, _ in found]
    return [lines_trace("cannot run", x, [level] * len(x), BAD, "%{text}", mode="markers", marker=cross, text=text)]
