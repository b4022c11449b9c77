"""One measured server as a document, and as a table that fits the width it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tuner.domain.experiment import Round, Start
from tuner.domain.measurement import LATENCIES, Ci95, Latency, Measurement, metric
from tuner.domain.profile import Constraint
from tuner.domain.units import counted
from tuner.report.numbers import metric_title, metric_value, ms
from tuner.report.words import SIMULATED

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


@dataclass(frozen=True)
class BenchResult:
    """What `bench` measured; without a median when no round counts."""

    start: Start
    rounds: list[Round]
    median: Measurement | None = None
    pooled: dict[str, Latency] = field(default_factory=dict)
    """Percentiles over the requests of all rounds together."""
    ci95: Ci95 = field(default_factory=dict)
    constraints: Sequence[Constraint] = ()
    warnings: Sequence[str] = ()

    @property
    def kept(self) -> int:
        """Rounds that count."""
        return sum(r.kept for r in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`: that of the start, with its rounds and what they amount to."""
        return {
            **self.start.to_json(),
            "rounds": [r.to_json() for r in self.rounds],
            "median": None if self.median is None else self.median.to_json(),
            "pooled": {name: each.to_json() for name, each in self.pooled.items()},
            "ci95": self.ci95,
            "violates": self.violates(),
            "warnings": list(self.warnings),
        }

    def violates(self) -> list[str]:
        """The constraints that the median does not meet: `itl_ms.p99 <= 250 (605 ms)`."""
        found = []
        for limit in self.constraints if self.median is not None else ():
            assert self.median is not None
            if limit.holds(self.median) is None:
                reason = self.median.unmeasured.get(limit.metric.partition(".")[0], "no reason given")
                found.append(f"{limit} (not measured: {reason})")
            elif not limit.holds(self.median):
                found.append(f"{limit} ({metric_value(limit.metric, metric(self.median, limit.metric))})")
        return found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Latencies with the 95 % interval of their P90, the other metrics, what is missing and what to mind.

        It adapts to the console's width, legible down to 60 columns. Text from a server is never markup.
        """
        start, median = self.start, self.median
        parts: list[RenderableType] = [Text(SIMULATED, "bold yellow")] if start.simulated else []
        if median is None:
            parts.append(Text(f"{start.label}: no round counts", style="bold"))
        else:
            ended = ", then interrupted" if start.state == "interrupted" else ""
            title = f"{start.label}, median of {counted(self.kept, 'round')}{ended}, times in ms"
            parts += [Text(title, style="bold"), self._latencies(median, wide=options.max_width >= WIDE)]
            parts += [Text(), _others(median)]
            parts += [
                Text(f"not measured: {name}: {reason}", style="dim") for name, reason in median.unmeasured.items()
            ]
        parts += [Text(f"outside {violation}", style="red") for violation in self.violates()]
        parts += [Text(f"note: {warning}", style="yellow") for warning in self.warnings]
        if start.message:
            parts.append(Text(f"{start.cause}: {start.message}", style="red"))
        yield Group(*parts)

    def _latencies(self, median: Measurement, *, wide: bool) -> Table:
        headings = ["P50", "P90", "P90 95 %", "P99", *(["mean", "n a round"] if wide else [])]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1) if wide else (0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for name in LATENCIES:
            latency: Latency | None = getattr(median, name)
            if latency is None:
                continue
            interval = self.ci95.get(f"{name}.p90")
            cells = [
                name.removesuffix("_ms"),
                ms(latency.p50),
                ms(latency.p90),
                f"{ms(interval[0])} to {ms(interval[1])}" if interval else "",
                ms((self.pooled.get(name) or latency).p99),
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
