"""One measured server as a table for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tuner.domain.measurement import LATENCIES, Latency, Measurement, metric
from tuner.domain.outcome import Trial
from tuner.domain.units import counted
from tuner.report.numbers import metric_title, metric_value

_PLAIN = (
    "request_throughput",
    "output_token_throughput",
    "goodput",
    "failed_requests",
    "prefix_hit_rate",
    "prefill_chunks_per_request",
    "engine_steps",
    "preemptions",
    "kv_cache_usage_peak",
    "memory.peak_fraction",
)


def bench_table(trial: Trial) -> RenderableType:
    """Latencies with the 95 % interval of their P90, the other metrics, what is missing and what to mind."""
    parts: list[RenderableType] = []
    if trial.median is None:
        parts.append(Text(f"{trial.label}: no round counts", style="bold"))
    else:
        parts += [_latencies(trial, trial.median), _others(trial.median)]
        parts += [
            Text(f"not measured: {name}: {reason}", style="dim") for name, reason in trial.median.unmeasured.items()
        ]
    parts += [Text(f"violated: {violation}", style="red") for violation in trial.violations]
    parts += [Text(f"note: {warning}", style="yellow") for warning in trial.warnings]
    if trial.message:
        parts.append(Text(f"{trial.cause}: {trial.message}", style="red"))
    return Group(*parts)


def _rounds(trial: Trial) -> str:
    text = f"median of {counted(sum(r.void is None for r in trial.rounds), 'round')}"
    return f"{text}, then interrupted" if trial.state == "interrupted" else text


def _latencies(trial: Trial, median: Measurement) -> Table:
    table = Table(title=f"{trial.label}, {_rounds(trial)}, ms", title_justify="left")
    table.add_column("")
    for heading in ("P50", "P90", "P99", "mean", "P90 95 % interval", "n a round"):
        table.add_column(heading, justify="right")
    for name in LATENCIES:
        latency: Latency | None = getattr(median, name)
        if latency is None:
            continue
        low_high = trial.ci95.get(f"{name}.p90")
        pooled = trial.pooled.get(name)
        table.add_row(
            name.removesuffix("_ms"),
            f"{latency.p50:.1f}",
            f"{latency.p90:.1f}",
            f"{(pooled or latency).p99:.1f}",
            f"{latency.mean:.1f}",
            f"{low_high[0]:.1f} to {low_high[1]:.1f}" if low_high else "",
            str(latency.n),
        )
    return table


def _others(median: Measurement) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    for path in _PLAIN:
        table.add_row(metric_title(path), metric_value(path, metric(median, path)))
    return table
