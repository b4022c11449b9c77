"""One measured server as a table that fits the width it is given."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tuner.domain.measurement import LATENCIES, Latency, Measurement, metric
from tuner.domain.experiment import Trial
from tuner.domain.units import counted
from tuner.report.answer import SIMULATED, limit_text
from tuner.report.numbers import metric_title, metric_value, ms

WIDE = 80
"""Columns from which the mean and the sample size have a place."""
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
    """Latencies with the 95 % interval of their P90, the other metrics, what is missing and what to mind.

    It adapts to the console's width when printed, legible down to 60 columns. Text from a server is never markup.
    """
    return _Bench(trial)


@dataclass(frozen=True)
class _Bench:
    trial: Trial

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trial = self.trial
        parts: list[RenderableType] = [Text(SIMULATED, "bold yellow")] if trial.simulated else []
        if trial.median is None:
            parts.append(Text(f"{trial.label}: no round counts", style="bold"))
        else:
            parts.append(Text(f"{trial.label}, {_rounds(trial)}, times in ms", style="bold"))
            parts += [_latencies(trial, trial.median, wide=options.max_width >= WIDE), Text(), _others(trial.median)]
            parts += [
                Text(f"not measured: {name}: {reason}", style="dim") for name, reason in trial.median.unmeasured.items()
            ]
        parts += [Text(f"outside {limit_text(violation)}", style="red") for violation in trial.violations]
        parts += [Text(f"note: {warning}", style="yellow") for warning in trial.warnings]
        if trial.message:
            parts.append(Text(f"{trial.cause}: {trial.message}", style="red"))
        yield Group(*parts)


def _rounds(trial: Trial) -> str:
    text = f"median of {counted(sum(r.void is None for r in trial.rounds), 'round')}"
    return f"{text}, then interrupted" if trial.state == "interrupted" else text


def _latencies(trial: Trial, median: Measurement, *, wide: bool) -> Table:
    headings = ["P50", "P90", "P90 95 %", "P99", *(["mean", "n a round"] if wide else [])]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1) if wide else (0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name in LATENCIES:
        latency: Latency | None = getattr(median, name)
        if latency is None:
            continue
        interval = trial.ci95.get(f"{name}.p90")
        cells = [
            name.removesuffix("_ms"),
            ms(latency.p50),
            ms(latency.p90),
            f"{ms(interval[0])} to {ms(interval[1])}" if interval else "",
            ms((trial.pooled.get(name) or latency).p99),
            *([ms(latency.mean), str(latency.n)] if wide else []),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _others(median: Measurement) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for path in _PLAIN:
        table.add_row(Text(metric_title(path)), Text(metric_value(path, metric(median, path))))
    return table
