"""The answer in the terminal: a table of chunk sizes that fits the width it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tuner.domain.measurement import metric
from tuner.domain.experiment import StudyFile, Summary, TableRow, Trial
from tuner.domain.units import format_duration
from tuner.report.answer import (
    SIMULATED,
    STATE_WORDS,
    TTFT_COLUMNS,
    Answer,
    advice_beside_failures,
    answer,
    by_number,
    failures,
    is_baseline,
    objectives_beside,
    row_name,
    row_note,
    sentence,
)
from tuner.report.numbers import DASH, cell_value, gib, metric_title, ms, percent, short

WIDE = 118
"""Columns of a terminal from which the whole table fits."""
MOST_FAILURES = 5
_WIDE_COLUMNS = (*TTFT_COLUMNS, "itl_ms.p99", "prefix_hit_rate", "prefill_chunks_per_request", "request_throughput")


def closing_table(summary: Summary, study: StudyFile, trials: Sequence[Trial]) -> RenderableType:
    """What a sweep says at its end: the answer, the table per chunk size, failures, advice, time.

    It adapts to the console's width when printed: whole from 118 columns, short headings and the
    essential columns below, legible down to 60. Text from models, logs or users is never markup.
    """
    return _Closing(summary, study, tuple(trials))


@dataclass(frozen=True)
class _Closing:
    summary: Summary
    study: StudyFile
    trials: tuple[Trial, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        parts: list[RenderableType] = []
        if self.summary.simulated:
            parts.append(_simulated_banner())
        said = answer(self.study, self.summary, self.trials)
        if self.summary.table:
            beside = objectives_beside(self.study, _WIDE_COLUMNS if wide else TTFT_COLUMNS)
            parts.append(_table(self.summary, self.trials, beside, wide=wide))
            parts.append(Text(_legend(self.summary, self.trials, beside, said), style="dim"))
        parts += [Text(), _answer_text(said, simulated=self.summary.simulated)]
        parts += _failure_lines(self.trials)
        parts += [Text(f"Note: {line}") for line in advice_beside_failures(self.summary, failures(self.trials))]
        parts.append(Text(_time_line(self.summary), style="dim"))
        yield Group(*parts)


def _simulated_banner() -> Text:
    return Text(SIMULATED, "bold yellow")


def _table(summary: Summary, trials: Sequence[Trial], beside: Sequence[str], *, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if not wide else (0, 1), show_edge=False)
    for heading in _headings(beside, wide=wide):
        table.add_column(heading, justify="left" if heading in ("", "note") else "right", no_wrap=heading != "note")
    for row in summary.table:
        trial = by_number(trials, row.trial)
        style = "bold green" if row.best else None
        table.add_row(*_cells(row, trial, summary, beside, wide=wide), style=style)
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


def _cells(row: TableRow, trial: Trial | None, summary: Summary, beside: Sequence[str], *, wide: bool) -> list[Text]:
    mark = _mark(row, trial, summary)
    ttft = [ms(row.ttft_p50_ms), ms(row.ttft_p90_ms), ms(row.ttft_p99_ms)]
    parts = short(row.prefill_chunks_per_request)
    median = None if trial is None else trial.median
    aims = [cell_value(path, None if median is None else metric(median, path)) for path in beside]
    if not wide:
        hits = percent(row.prefix_hit_rate).removesuffix(" %")
        memory = DASH if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.1f}"
        cells = [mark, row_name(row, trial, summary), *aims, *ttft, *_least_needed([hits, parts], beside), memory]
    else:
        itl = None if median is None or median.itl_ms is None else median.itl_ms.p99
        throughput = None if median is None else median.request_throughput
        note = row_note(trial, summary, best=row.best)
        rate, memory = percent(row.prefix_hit_rate), gib(row.memory_bytes)
        rest = [ms(itl), rate, parts, short(throughput), memory, note]
        cells = [mark, row_name(row, trial, summary), *aims, *ttft, *rest]
    return [Text(cell) for cell in cells]


def _mark(row: TableRow, trial: Trial | None, summary: Summary) -> str:
    part = "*" if row.best else "b" if is_baseline(trial, summary) else ""
    return f"{part}!" if trial is not None and trial.violations else part


def _legend(summary: Summary, trials: Sequence[Trial], beside: Sequence[str], said: Answer) -> str:
    sources = {row.memory_source for row in summary.table if row.memory_bytes is not None}
    memory = f"memory: {', '.join(sorted(sources))}" if sources else "memory: not measured"
    shown = [_mark(row, by_number(trials, row.trial), summary) for row in summary.table]
    words = {
        "*": "best of the others" if said.kind == "stock_will_do" else "winner",
        "b": "baseline",
        "!": "breaks a limit",
    }
    marks = "  ".join(f"{mark} {word}" for mark, word in words.items() if any(mark in each for each in shown))
    aims = [f"{name}: {metric_title(path)}" for name, path in zip(_objective_headings(beside), beside, strict=True)]
    return "  ".join(filter(None, [marks, *aims, "times in ms, medians of the rounds; P99 over all", memory]))


def _answer_text(said: Answer, *, simulated: bool) -> Text:
    text = f"{said.sentence}{' (SIMULATED)' if simulated else ''}"
    return Text(text, style="bold" if said.kind in ("winner", "stock_will_do", "stock_best") else "bold yellow")


def _failure_lines(trials: Sequence[Trial]) -> list[Text]:
    found = failures(trials)
    lines = []
    for failure in found[:MOST_FAILURES]:
        numbers = ", ".join(str(n) for n in failure.trials[:8]) + (" ..." if len(failure.trials) > 8 else "")
        told = " ".join(sentence(part) for part in (failure.message, failure.hint) if part)
        noun = "trial" if len(failure.trials) == 1 else "trials"
        head = f"{len(failure.trials)} x {failure.cause} ({noun} {numbers})"
        lines.append(Text(f"{head}: {told}" if told else head, style="yellow"))
    if len(found) > MOST_FAILURES:
        lines.append(Text(f"and {len(found) - MOST_FAILURES} more causes: see summary.json", style="yellow"))
    return lines


def _time_line(summary: Summary) -> str:
    time = summary.time
    counted = ", ".join(f"{n} {STATE_WORDS.get(state, state)}" for state, n in summary.counts.items() if n)
    spent = (
        f"{format_duration(time.total_s)}: engine starts {format_duration(time.engine_start_s)}, "
        f"load {format_duration(time.load_s)}, own {format_duration(time.overhead_s)}"
    )
    return f"{counted}. {spent}." if counted else f"{spent}."
