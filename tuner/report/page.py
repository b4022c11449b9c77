"""What stands on the page, section by section, as plain values for the template. Pure."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.domain.experiment import STOCK_ID, SettingLine, Start, StudyFile, TableRow
from tuner.domain.measurement import higher_is_better, metric
from tuner.domain.units import counted, format_duration
from tuner.report.data import ReportData
from tuner.report.figures import Figure, all_figures
from tuner.report.method import describe_engine, describe_method, fingerprint_rows
from tuner.report.numbers import DASH, cell_value, gib, metric_title, metric_value, ms, percent, short, signed_percent
from tuner.report.words import STATE_WORDS, TTFT_COLUMNS, objective_of, objectives_beside, row_name, row_note, sentence

OPEN_ROWS = 24
"""Rows up to which the tables of chunks, settings and starts stand open on the page; longer ones are folded away."""
_COMPARED = (
    *TTFT_COLUMNS,
    "cold_ttft_ms.p90",
    "itl_ms.p99",
    "e2e_ms.p90",
    "request_throughput",
    "output_token_throughput",
    "prefix_hit_rate",
    "prefill_chunks_per_request",
    "preemptions",
    "kv_cache_usage_peak",
    "gpu_utilization.mean",
)
_SETTING_COLUMNS = (*TTFT_COLUMNS, "itl_ms.p99", "request_throughput")


@dataclass(frozen=True)
class Row:
    """A row of a table, as text: its heading, numbers, and a note in words. What follows a line break is small."""

    name: str
    cells: Sequence[str]
    texts: Sequence[str] = ()
    """Columns of words, after the name."""
    note: str = ""
    kind: str = ""
    """What the row looks like: `best`, `better`, `worse`."""


@dataclass(frozen=True)
class Page:
    """Everything that the template shows."""

    study: str
    created_at: str
    simulated: bool
    verdict: str
    sentence: str
    command: str
    needs_plugin: bool
    engine: str
    advice: Sequence[str]
    compared: Sequence[Row]
    compared_name: str
    chunks: Sequence[Row]
    memory_source: str
    figures: Sequence[Figure]
    settings: Sequence[Row]
    setting_headings: Sequence[str]
    starts: Sequence[Row]
    not_measured: Sequence[tuple[str, str]]
    fingerprint: Sequence[tuple[str, str]]
    method: Sequence[str]
    time: str
    chunktune_version: str
    open_rows: int = OPEN_ROWS

    @property
    def drawn(self) -> list[Figure]:
        """The figures that have data."""
        return [f for f in self.figures if not f.absent]


def make_page(data: ReportData) -> Page:
    """The page of a study, whatever came of it."""
    study, summary = data.study, data.summary
    figures = [_stamped(f) if summary.simulated else f for f in all_figures(data)]
    beside = objectives_beside(study, _SETTING_COLUMNS)
    rows = sorted(summary.table, key=lambda r: (r.max_num_batched_tokens is not None, r.max_num_batched_tokens or 0))
    sources = sorted({r.memory_source for r in summary.table if r.memory_bytes is not None})
    return Page(
        study=study.study,
        created_at=study.created_at,
        simulated=summary.simulated or study.simulated,
        verdict=summary.verdict,
        sentence=sentence(summary.sentence),
        command=_shell(data.command, _environment(study)) if data.command else "",
        needs_plugin=any("ReuseBudgetScheduler" in word for word in data.command),
        engine=describe_engine(study),
        advice=[sentence(a) for a in summary.advice],
        compared=_comparisons(data),
        compared_name=data.compared.label if data.compared else "",
        chunks=[_chunk_row(row) for row in rows],
        memory_source=", ".join(sources) or "not measured",
        figures=figures,
        settings=[_setting_row(line, data, beside) for line in summary.settings],
        setting_headings=[
            *(metric_title(path) for path in beside),
            *("TTFT P50", "P90", "P99", "ITL P99", "req/s", f"{metric_title(data.path)} against stock", "P(limits)"),
        ],
        starts=[_start_row(start, data) for start in data.results.starts],
        not_measured=_not_measured(data, figures),
        fingerprint=fingerprint_rows(study),
        method=describe_method(data),
        time=_time(data),
        chunktune_version=study.versions.get("chunktune", ""),
    )


def csv_text(figure: Figure) -> str:
    """The figure's data as CSV with a header; missing values are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(figure.header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in figure.rows)
    return out.getvalue()


def _stamped(figure: Figure) -> Figure:
    """The figure with SIMULATED across it, so that a cut-out picture says so too."""
    stamp: dict[str, Any] = {
        "text": "SIMULATED",
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "showarrow": False,
        "textangle": -18,
        "opacity": 0.16,
        "font": {"size": 44, "color": "@ink"},
    }
    layout = {**figure.layout, "annotations": [stamp]}
    return replace(figure, layout=layout) if figure.traces else figure


def _environment(study: StudyFile) -> dict[str, str]:
    """The engine's environment as the profile has it."""
    engine = study.profile.get("engine")
    env = engine.get("env") if isinstance(engine, dict) else None
    return {str(k): str(v) for k, v in env.items() if str(k).isidentifier()} if isinstance(env, dict) else {}


def _shell(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command over several lines, a variable or an option a line, safe to paste."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    start = len(lines)
    for word in words:
        if word.startswith("--") or len(lines) == start:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(lines)


def _comparisons(data: ReportData) -> list[Row]:
    """Stock, the setting compared with it, the change and its interval, a row a metric."""
    stock, other = data.stock, data.compared
    if stock is None or other is None:
        return []
    found = []
    for path in dict.fromkeys((*objective_of(data.study).metrics, *_COMPARED)):
        contrast = other.vs_stock.get(path)
        cells = [_level(path, line) for line in (stock, other)]
        if cells != [DASH, DASH]:
            change = signed_percent(contrast.change) if contrast else DASH
            interval = contrast.ci95 if contrast else None
            reading = _reading(path, interval)
            row = (*cells, change, _signed_interval(interval) or DASH)
            found.append(Row(metric_title(path), row, note=reading, kind=reading.partition(" ")[0]))
    return found


def _reading(path: str, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    if low <= 0 <= high:
        return "no difference shown"
    return "better" if (low > 0) == higher_is_better(path) else "worse"


def _signed_interval(interval: tuple[float, float] | None) -> str:
    return f"{signed_percent(interval[0])} to {signed_percent(interval[1])}" if interval else ""


def _level(path: str, line: SettingLine) -> str:
    """The median, and its interval below."""
    value = metric_value(path, None if line.median is None else metric(line.median, path))
    if path not in line.ci95:
        return value
    low, high = (metric_value(path, side) for side in line.ci95[path])
    unit = low.partition(" ")[2]
    return value if low == high else f"{value}\n{low.removesuffix(unit).strip()} to {high}"


def _chunk_row(row: TableRow) -> Row:
    cells = (gib(row.memory_bytes), ms(row.ttft_p50_ms), ms(row.ttft_p90_ms), ms(row.ttft_p99_ms))
    rest = (percent(row.prefix_hit_rate), short(row.prefill_chunks_per_request))
    return Row(row_name(row), (*cells, *rest), note=row_note(row), kind="best" if row.winner else "")


def _setting_row(line: SettingLine, data: ReportData, beside: Sequence[str]) -> Row:
    def of(path: str) -> float | None:
        return None if line.median is None else metric(line.median, path)

    contrast = line.vs_stock.get(data.path)
    change = DASH if contrast is None else signed_percent(contrast.change)
    interval = _signed_interval(contrast.ci95) if contrast else ""
    cells = (
        *(cell_value(path, of(path)) for path in beside),
        *(ms(of(path)) for path in (*TTFT_COLUMNS, "itl_ms.p99")),
        short(of("request_throughput")),
        f"{change}\n{interval}" if interval else change,
        DASH if line.p_feasible is None else f"{line.p_feasible:.2f}",
    )
    measured = f"{counted(line.rounds, 'round')} on {counted(line.starts, 'start')}" if line.rounds else ""
    texts = (f"{line.label}\n{measured}" if measured else line.label, STATE_WORDS[line.state])
    return Row(str(line.id), cells, texts, line.cause or "", kind="best" if line.id == data.summary.winner else "")


def _start_row(start: Start, data: ReportData) -> Row:
    rows = [row for row in data.results.rounds if row.start == start.number]
    kept = [row.measurement for row in rows if row.kept]
    peaks = [max(m.memory.peak_bytes.values()) for m in kept if m.memory.peak_bytes]
    pools = [m.kv_cache_tokens for m in kept if m.kv_cache_tokens is not None]
    cells = (
        str(len(start.settings)),
        str(len(kept)),
        str(len(rows) - len(kept)),
        *(format_duration(s) if s else DASH for s in (start.time.engine_start_s, start.time.load_s)),
        gib(max(peaks, default=None)),
        short(max(pools, default=None)),
    )
    told = [f"{start.cause}:" if start.cause else "", *map(sentence, filter(None, (start.message, start.hint)))]
    told += [sentence(warning) for warning in start.warnings]
    purpose = f"{start.label or start.purpose}\nstarts/{start.number:04d}/engine.log"
    return Row(str(start.number), cells, (purpose, STATE_WORDS[start.state]), " ".join(filter(None, told)))


def _not_measured(data: ReportData, figures: Sequence[Figure]) -> list[tuple[str, str]]:
    """(what, why) for metrics, discarded rounds, files and figures."""
    kept = data.results.kept()
    reasons = [(name, why) for row in kept for name, why in row.measurement.unmeasured.items()]
    reasons += [
        ("memory", row.measurement.memory.reason or "no source of memory figures")
        for row in kept
        if row.measurement.memory.source == "unavailable" and "memory" not in row.measurement.unmeasured
    ]
    metrics = [
        (_metric_name(name), f"{why.rstrip('.')} ({'every round' if n >= len(kept) else counted(n, 'round')}).")
        for name, why, n in _alike(reasons)
    ]
    lost = [("", row.reason or row.code or "no reason given") for row in data.results.rounds if not row.kept]
    discarded = [("Rounds discarded", f"{why.rstrip('.')} ({counted(n, 'round')}).") for _, why, n in _alike(lost)]
    files = [("Data on disk", sentence(text)) for text in data.missing]
    absent = [(f"Figure “{f.title}”", sentence(f.absent)) for f in figures if f.absent]
    return [*metrics, *discarded, *files, *absent]


def _alike(reasons: Sequence[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """(name, reason, number), the most frequent first; reasons that differ only in their numbers count as one."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for name, why in reasons:
        kind = (name, re.sub(r"\d+", "#", why))
        examples.setdefault(kind, why)
        counts[kind] += 1
    return [(kind[0], examples[kind], n) for kind, n in counts.most_common()]


def _metric_name(name: str) -> str:
    return (
        "Memory"
        if name == "memory"
        else metric_title(f"{name}.p50" if name.endswith("_ms") else name).removesuffix(" P50")
    )


def _time(data: ReportData) -> str:
    time = data.summary.time
    settings = counted(sum(line.id != STOCK_ID for line in data.summary.settings), "setting")
    return (
        f"{settings} and stock in {format_duration(time.total_s)}: {counted(time.starts, 'engine start')} "
        f"{format_duration(time.engine_start_s)}, load {format_duration(time.load_s)}, "
        f"overhead {format_duration(time.overhead_s)}."
    )
