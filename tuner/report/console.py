"""The answer in the terminal: a table of chunk sizes that fits the width it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tuner.domain.experiment import STOCK_ID, StudyFile, StudySummary, TableRow
from tuner.domain.measurement import metric
from tuner.domain.units import counted, format_duration, printable
from tuner.report.numbers import DASH, cell_value, gib, metric_title, ms, percent, short
from tuner.report.words import (
    SIMULATED,
    STATE_WORDS,
    TTFT_COLUMNS,
    line_of,
    objectives_beside,
    row_name,
    row_note,
    sentence,
)

WIDE = 118
"""Columns of a terminal from which the whole table fits."""
_WIDE_COLUMNS = (*TTFT_COLUMNS, "itl_ms.p99", "prefix_hit_rate", "prefill_chunks_per_request", "request_throughput")
_MARKS = {"*": "winner", "s": "stock", "!": "breaks a limit", "+": "other knobs too, see summary.json"}


def closing_table(summary: StudySummary, study: StudyFile) -> RenderableType:
    """What a sweep says at its end: the table per chunk size, the verdict's sentence, advice, and where the time went.

    It adapts to the console's width when printed: whole from 118 columns, short headings and the
    essential columns below, legible down to 60. Text from models, logs or users is never markup.
    """
    return _Closing(summary, study)


@dataclass(frozen=True)
class _Closing:
    summary: StudySummary
    study: StudyFile

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary, wide = self.summary, options.max_width >= WIDE
        parts: list[RenderableType] = [Text(SIMULATED, "bold yellow")] if summary.simulated else []
        if summary.table:
            beside = objectives_beside(self.study, _WIDE_COLUMNS if wide else TTFT_COLUMNS)
            parts += [_table(summary, beside, wide=wide), Text(_legend(summary, beside), style="dim"), Text()]
        style = "bold yellow" if summary.verdict == "none" else "bold"
        parts.append(Text(f"{sentence(summary.sentence)}{' (SIMULATED)' if summary.simulated else ''}", style=style))
        parts += [Text(line, style="yellow") for line in _not_run(summary)]
        parts += [Text(f"Note: {printable(line)}") for line in summary.advice]
        parts.append(Text(_time_line(summary), style="dim"))
        yield Group(*parts)


def _table(summary: StudySummary, beside: Sequence[str], *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1) if wide else (0, 1, 0, 0), show_edge=False)
    for heading in _headings(beside, wide=wide):
        left = heading in ("", "note")
        most = (28 if wide else 18) if heading == "chunk" else None
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "note", max_width=most)
    for row in summary.table:
        cells = _cells(row, summary, beside, wide=wide)
        table.add_row(*map(Text, cells), style="bold green" if row.winner else None)
    return table


def _objective_headings(beside: Sequence[str]) -> list[str]:
    return ["objective"] if len(beside) == 1 else [f"obj. {n}" for n, _ in enumerate(beside, 1)]


def _headings(beside: Sequence[str], *, wide: bool) -> list[str]:
    aims = _objective_headings(beside)
    if not wide:
        return ["", "chunk", *aims, "P50", "P90", "P99", *_least_needed(["hit %", "steps"], beside), "GiB"]
    rest = ["P90", "P99", "ITL P99", "hit rate", "chunks/req", "req/s", "memory", "note"]
    return ["", "chunk", *aims, "TTFT P50", *rest]


def _least_needed(columns: list[str], beside: Sequence[str]) -> list[str]:
    """What a narrow table keeps of its last columns: each objective takes the place of one."""
    return columns[: len(columns) - len(beside)]


def _cells(row: TableRow, summary: StudySummary, beside: Sequence[str], *, wide: bool) -> list[str]:
    line = line_of(summary, row.setting)

    def of(path: str) -> float | None:
        return None if line is None or line.median is None else metric(line.median, path)

    first = [_mark(row), row_name(row), *(cell_value(path, of(path)) for path in beside)]
    first += [ms(row.ttft_p50_ms), ms(row.ttft_p90_ms), ms(row.ttft_p99_ms)]
    hits, parts = percent(row.prefix_hit_rate), short(row.prefill_chunks_per_request)
    if wide:
        rest = [ms(of("itl_ms.p99")), hits, parts, short(of("request_throughput"))]
        return [*first, *rest, gib(row.memory_bytes), row_note(row)]
    memory = DASH if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.1f}"
    return [*first, *_least_needed([hits.removesuffix(" %"), parts], beside), memory]


def _mark(row: TableRow) -> str:
    return f"{'*' if row.winner else ''}{'s' if row.setting == STOCK_ID else ''}{'!' if row.violates else ''}"


def _legend(summary: StudySummary, beside: Sequence[str]) -> str:
    sources = sorted({row.memory_source for row in summary.table if row.memory_bytes is not None})
    memory = f"memory of the engine start: {', '.join(sources)}" if sources else "memory: not measured"
    shown = "".join(_mark(row) + row_name(row)[-1:] for row in summary.table)
    marks = "  ".join(f"{mark} {word}" for mark, word in _MARKS.items() if mark in shown)
    aims = [f"{name}: {metric_title(path)}" for name, path in zip(_objective_headings(beside), beside, strict=True)]
    return "  ".join(filter(None, [marks, *aims, "times in ms, medians of the rounds", memory]))


def _not_run(summary: StudySummary) -> list[str]:
    """The settings that gave no numbers, one line a cause."""
    by_cause: dict[tuple[str, str], list[str]] = {}
    for line in summary.settings:
        if line.state in ("infeasible", "failed"):
            by_cause.setdefault((STATE_WORDS[line.state], line.cause or "unknown"), []).append(line.label)
    return [
        f"{word.capitalize()}: {'; '.join(labels[:8])}{'; ...' if len(labels) > 8 else ''} ({cause})"
        for (word, cause), labels in by_cause.items()
    ]


def _time_line(summary: StudySummary) -> str:
    time = summary.time
    starts = counted(time.starts, "engine start")
    states = ", ".join(f"{n} {STATE_WORDS.get(state, state)}" for state, n in summary.counts.items() if n)
    return (
        f"{format_duration(time.total_s)}: {starts} {format_duration(time.engine_start_s)}, "
        f"load {format_duration(time.load_s)}, overhead {format_duration(time.overhead_s)}"
        f"{f'. Settings: {states}' if states else ''}."
    )
