"""TTFT and memory over the chunk size."""

from __future__ import annotations

from tuner.domain.setting import CHUNK_KNOB
from tuner.domain.measurement import Memory
from tuner.domain.experiment import Trial
from tuner.report.answer import objective_of, trial_label
from tuner.report.data import ReportData
from tuner.report.figures.base import (
    ACCENT,
    INK,
    MOST_LABELLED,
    MUTED,
    SOFT,
    Cell,
    Figure,
    Trace,
    axis,
    error_bars,
    literal,
    log_axis,
    metric_axis,
    rounded,
    value,
)

GIB = 2**30
_QUANTILES = (("p50", SOFT), ("p90", ACCENT), ("p99", MUTED))


def chunk_of(trial: Trial) -> int | None:
    """The chunk size asked for; None where the candidate leaves it to vLLM."""
    size = trial.knobs.get(CHUNK_KNOB)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def one_per_chunk(data: ReportData) -> list[Trial]:
    """A configuration for each chunk size: the one that varies nothing else, or the best where all vary more."""
    objective = objective_of(data.study)
    path, sign = objective.metrics[0], objective.signs[0]
    sized = [t for t in data.configurations() if chunk_of(t) is not None and t.role not in ("baseline", "reference")]
    plain = [t for t in sized if set(t.knobs) == {CHUNK_KNOB} and t.reuse_budget is None]
    chosen: dict[int, tuple[float, Trial]] = {}
    for trial in plain if len({chunk_of(t) for t in plain}) >= 2 else sized:
        score = value(trial, path)
        ranked = (float("inf") if score is None else sign * score, trial)
        size = chunk_of(trial) or 0
        if size not in chosen or ranked[0] < chosen[size][0]:
            chosen[size] = ranked
    return [chosen[size][1] for size in sorted(chosen)]


def ttft_by_chunk(data: ReportData) -> Figure:
    """P50, P90 and P99 with intervals, the baseline's P90 as a line."""
    title, says = "TTFT over chunk size", "Lower is better."
    trials = [t for t in one_per_chunk(data) if t.median is not None and t.median.ttft_ms is not None]
    if not trials:
        return Figure("ttft-by-chunk", title, says, absent="no chunk size has a measured TTFT")
    sizes = [chunk_of(t) or 0 for t in trials]
    mode = "lines+markers" if len(trials) <= MOST_LABELLED else "markers"
    traces = [_quantile(trials, sizes, stat, colour, mode) for stat, colour in _QUANTILES]
    if any("error_y" in trace for trace in traces):
        says += " Bars are 95 % intervals over the rounds."
    baseline = data.baseline
    level = None if baseline is None else value(baseline, "ttft_ms.p90")
    if level is not None:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "stock P90",
                "x": [min(sizes), max(sizes)],
                "y": [level, level],
                "line": {"color": INK, "width": 1.2, "dash": "dot"},
                "hovertemplate": "stock: P90 %{y:.0f} ms<extra></extra>",
            }
        )
    values = [y for trace in traces for y in trace["y"] if y is not None]
    rows: list[list[Cell]] = [
        [t.number, size, *(rounded(value(t, f"ttft_ms.{s}")) for s, _ in _QUANTILES), *_interval(t, "ttft_ms.p90")]
        for t, size in zip(trials, sizes, strict=True)
    ]
    return Figure(
        "ttft-by-chunk",
        title,
        says,
        traces,
        {"xaxis": log_axis("max_num_batched_tokens", sizes), "yaxis": metric_axis("ttft_ms.p90", values, "TTFT")},
        ["trial", "chunk", "p50_ms", "p90_ms", "p99_ms", "p90_low_ms", "p90_high_ms"],
        rows,
    )


def _quantile(trials: list[Trial], sizes: list[int], stat: str, colour: str, mode: str) -> Trace:
    trace: Trace = {
        "type": "scatter",
        "mode": mode,
        "name": stat.upper(),
        "x": sizes,
        "y": [value(t, f"ttft_ms.{stat}") for t in trials],
        "text": [literal(f"trial {t.number}, {trial_label(t)}") for t in trials],
        "line": {"color": colour, "width": 2.4 if stat == "p90" else 1.4},
        "marker": {"color": colour, "size": 7 if mode != "markers" else 4},
        "hovertemplate": f"%{{text}}<br>{stat.upper()} %{{y:.1f}} ms<extra></extra>",
    }
    bars = error_bars(trials, f"ttft_ms.{stat}") if mode != "markers" else None
    return {**trace, "error_y": {**bars, "color": colour}} if bars else trace


def _interval(trial: Trial, path: str) -> tuple[Cell, Cell]:
    low, high = trial.ci95.get(path, (None, None))
    return rounded(low), rounded(high)


_PARTS = (
    ("weights_bytes", "weights", MUTED),
    ("kv_pool_bytes", "KV pool", SOFT),
    ("kv_in_use_peak_bytes", "KV in use", SOFT),
    ("activation_peak_bytes", "activation peak", ACCENT),
)


def memory_by_chunk(data: ReportData) -> Figure:
    """The device's peak beside the parts that the engine tells apart."""
    title = "Memory over chunk size"
    says = "The engine preallocates its KV pool, so the device's peak hardly moves; the parts "
    says += "tell chunk sizes apart. Bars, where there are any, span the rounds."
    trials = [t for t in one_per_chunk(data) if t.median is not None and _has_memory(t.median.memory)]
    if not trials:
        return Figure("memory-by-chunk", title, says, absent="no memory figure for any chunk size")
    sizes = [chunk_of(t) or 0 for t in trials]
    mode = "lines+markers" if len(trials) <= MOST_LABELLED else "markers"
    series = {"device peak": [peak_gib(t) for t in trials]}
    series |= {name: [_part_gib(t, field) for t in trials] for field, name, _ in _PARTS}
    colours = {"device peak": INK} | {name: colour for _, name, colour in _PARTS}
    kept = {name: values for name, values in series.items() if any(v is not None for v in values)}
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": mode,
            "name": name,
            "x": sizes,
            "y": values,
            "text": [literal(f"trial {t.number}, {trial_label(t)}") for t in trials],
            "line": {
                "color": colours[name],
                "width": 2.4 if name == "activation peak" else 1.4,
                "dash": "dot" if name in ("weights", "KV in use") else "solid",
            },
            "marker": {
                "color": colours[name],
                "size": 6 if mode != "markers" else 4,
                "symbol": "circle-open" if name in ("weights", "KV in use") else "circle",
            },
            "hovertemplate": f"%{{text}}<br>{name} %{{y:.2f}} GiB<extra></extra>",
        }
        for name, values in kept.items()
    ]
    bars = _peak_spread(trials) if mode != "markers" else None
    if bars and kept and traces[0]["name"] == "device peak":
        traces[0]["error_y"] = {**bars, "color": INK}
    return Figure(
        "memory-by-chunk",
        title,
        says,
        traces,
        {"xaxis": log_axis("max_num_batched_tokens", sizes), "yaxis": axis("GiB per device", rangemode="tozero")},
        ["trial", "chunk", *(f"{name.replace(' ', '_')}_gib" for name in kept), "source"],
        [
            [t.number, size, *(rounded(values[i]) for values in kept.values()), _source(t)]
            for i, (t, size) in enumerate(zip(trials, sizes, strict=True))
        ],
    )


def peak_gib(trial: Trial) -> float | None:
    """The fullest device's peak."""
    peaks = None if trial.median is None else trial.median.memory.peak_bytes
    return max(peaks.values()) / GIB if peaks else None


def _peak_spread(trials: list[Trial]) -> dict[str, object] | None:
    """Error bars from the lowest to the highest round's peak; None when the rounds agree."""
    above: list[float] = []
    below: list[float] = []
    for trial in trials:
        peaks = [
            max(r.memory.peak_bytes.values()) / GIB for r in trial.rounds if r.void is None and r.memory.peak_bytes
        ]
        middle = peak_gib(trial)
        above.append(max(peaks) - middle if peaks and middle is not None else 0.0)
        below.append(middle - min(peaks) if peaks and middle is not None else 0.0)
    if not any(above) and not any(below):
        return None
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1.2, "width": 4}


def _part_gib(trial: Trial, field: str) -> float | None:
    parts = None if trial.median is None else trial.median.memory.breakdown
    size = None if parts is None else getattr(parts, field)
    return None if size is None else size / GIB


def _has_memory(memory: Memory) -> bool:
    parts = memory.breakdown.model_dump().values()
    return bool(memory.peak_bytes) or any(part is not None for part in parts)


def _source(trial: Trial) -> str:
    return "" if trial.median is None else trial.median.memory.source
