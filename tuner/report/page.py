"""What stands on the page, section by section, as plain values for the template. Pure."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuner.domain.measurement import higher_is_better, metric
from tuner.domain.experiment import StudyFile, TableRow, Trial
from tuner.domain.units import format_duration
from tuner.report.answer import (
    STATE_WORDS,
    TTFT_COLUMNS,
    Answer,
    Failure,
    advice_beside_failures,
    answer,
    copyable_command,
    failures,
    objective_of,
    objectives_beside,
    row_name,
    row_note,
    sentence,
    trial_label,
    unmeasured,
)
from tuner.report.data import ReportData
from tuner.report.figures import Figure, all_figures
from tuner.report.method import describe_engine, describe_method, fingerprint_rows
from tuner.report.numbers import (
    DASH,
    cell_value,
    metric_title,
    metric_value,
    ms,
    percent,
    short,
    signed_percent,
)

MOST_ROWS = 30
"""Rows of the chunk table and failures that stand open on the page; the rest is folded away."""
_COMPARED = (
    "ttft_ms.p50",
    "ttft_ms.p90",
    "ttft_ms.p99",
    "cold_ttft_ms.p90",
    "itl_ms.p99",
    "e2e_ms.p90",
    "request_throughput",
    "output_token_throughput",
    "prefix_hit_rate",
    "prefill_chunks_per_request",
    "preemptions",
    "kv_cache_usage_peak",
    "kv_cache_tokens",
    "memory.peak_fraction",
    "gpu_utilization.mean",
)
_TRIAL_COLUMNS = (*TTFT_COLUMNS, "itl_ms.p99", "request_throughput", "prefix_hit_rate")
_CHUNK_COLUMNS = (*_TRIAL_COLUMNS, "itl_ms.p50", "output_token_throughput", "prefill_chunks_per_request")


@dataclass(frozen=True)
class Comparison:
    """Stock and winner in one metric, as text."""

    name: str
    stock: str
    stock_interval: str
    winner: str
    winner_interval: str
    change: str
    interval: str
    reading: str
    """`better`, `worse`, `within noise`, `one round` or ''."""


@dataclass(frozen=True)
class ChunkRow:
    """A row of the chunk-size table, as text."""

    chunk: str
    trial: int
    label: str
    memory: str
    activation: str
    objectives: tuple[str, ...]
    """Those that have no column of their own."""
    ttft: tuple[str, str, str]
    interval: str
    itl: tuple[str, str]
    hit_rate: str
    prefill_chunks: str
    requests_s: str
    tokens_s: str
    note: str
    best: bool


@dataclass(frozen=True)
class TrialRow:
    """A row of the table of all trials, as text."""

    number: int
    role: str
    label: str
    state: str
    cells: tuple[str, ...]
    note: str
    best: bool


@dataclass(frozen=True)
class Page:
    """Everything that the template shows."""

    study: str
    created_at: str
    simulated: bool
    answer: Answer
    command: str
    needs_plugin: bool
    engine: str
    advice: Sequence[str]
    compared: Sequence[Comparison]
    compared_names: tuple[str, str]
    objective_titles: Sequence[str]
    chunks: Sequence[ChunkRow]
    more_chunks: Sequence[ChunkRow]
    memory_source: str
    figures: Sequence[Figure]
    failures: Sequence[Failure]
    not_measured: Sequence[tuple[str, str]]
    fingerprint: Sequence[tuple[str, str]]
    method: Sequence[str]
    trials: Sequence[TrialRow]
    trial_headings: Sequence[str]
    time: str
    chunktune_version: str

    @property
    def drawn(self) -> list[Figure]:
        """The figures that have data."""
        return [f for f in self.figures if not f.absent]


def make_page(data: ReportData) -> Page:
    """The page of a study, whatever came of it."""
    study, summary = data.study, data.summary
    said = answer(study, summary, data.trials)
    found = failures(data.trials)
    figures = [_stamped(f) if summary.simulated else f for f in all_figures(data)]
    beside = objectives_beside(study, _CHUNK_COLUMNS)
    rows = [_chunk_row(row, data, beside) for row in _ranked_rows(data)]
    beside_trials = objectives_beside(study, _TRIAL_COLUMNS)
    sources = sorted({r.memory_source for r in summary.table if r.memory_bytes is not None})
    return Page(
        study=study.study,
        created_at=study.created_at,
        simulated=summary.simulated or study.simulated,
        answer=said,
        command=_shell(data.command or copyable_command(said.winner), _environment(study)) if said.winner else "",
        needs_plugin=said.winner is not None and said.winner.reuse_budget is not None,
        engine=describe_engine(study),
        advice=[sentence(a) for a in advice_beside_failures(summary, found)],
        compared=_comparisons(data),
        compared_names=_compared_names(said),
        objective_titles=[metric_title(path) for path in beside],
        chunks=rows[:MOST_ROWS],
        more_chunks=rows[MOST_ROWS:],
        memory_source=", ".join(sources) or "not measured",
        figures=figures,
        failures=found,
        not_measured=_not_measured(data, figures),
        fingerprint=fingerprint_rows(study),
        method=describe_method(study, summary, data.trials),
        trials=[_trial_row(t, summary.best, beside_trials) for t in data.trials],
        trial_headings=[
            *(metric_title(path) for path in beside_trials),
            *("TTFT P50", "P90", "P99", "ITL P99", "req/s", "hit rate"),
        ],
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


def _compared_names(said: Answer) -> tuple[str, str]:
    winner = trial_label(said.winner) if said.winner else ""
    return ("stock", winner)


def _comparisons(data: ReportData) -> list[Comparison]:
    stock, winner = data.baseline, data.winner
    if stock is None or winner is None or stock.number == winner.number or not stock.median or not winner.median:
        return []
    found = []
    paths = [*dict.fromkeys((*objective_of(data.study).metrics, *_COMPARED))]
    alone = all(sum(not r.void for r in t.rounds) == 1 for t in (stock, winner))
    for path in sorted(paths, key=lambda p: _COMPARED.index(p) if p in _COMPARED else -1):
        before, after = metric(stock.median, path), metric(winner.median, path)
        told = data.summary.improvement.get(path)
        if told is not None:
            before, after = told.baseline, told.best
        if before is None and after is None:
            continue
        change = told.change if told else _change(before, after)
        interval = told.ci95 if told else None
        found.append(
            Comparison(
                name=metric_title(path),
                stock=metric_value(path, before),
                stock_interval=_interval_text(path, stock),
                winner=metric_value(path, after),
                winner_interval=_interval_text(path, winner),
                change=DASH if change is None else signed_percent(change),
                interval=f"{signed_percent(interval[0])} to {signed_percent(interval[1])}" if interval else "",
                reading="one round" if alone and interval else _reading(path, interval),
            )
        )
    return found


def _change(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or before == 0 else after / before - 1


def _reading(path: str, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    if low <= 0 <= high:
        return "within noise"
    return "better" if (low > 0) == higher_is_better(path) else "worse"


def _interval_text(path: str, trial: Trial) -> str:
    interval = trial.ci95.get(path)
    if interval is None:
        return ""
    low, high = (metric_value(path, side) for side in interval)
    if low == high:
        return ""
    unit = low.partition(" ")[2]
    return f"{low.removesuffix(unit).strip()} to {high}" if unit else f"{low} to {high}"


def _ranked_rows(data: ReportData) -> list[TableRow]:
    """The summary's rows by chunk size; when there are many, the winner, the references, then the best."""
    rows = list(data.summary.table)
    if len(rows) <= MOST_ROWS:
        return sorted(rows, key=lambda r: (r.max_num_batched_tokens is not None, r.max_num_batched_tokens or 0))
    objective = objective_of(data.study)
    sign = objective.signs[0]

    def rank(row: TableRow) -> float:
        trial = data.shown(row.trial)
        value = None if trial is None or trial.median is None else metric(trial.median, objective.metrics[0])
        return float("inf") if value is None else sign * value

    best_first = sorted(rows, key=rank)
    return sorted(best_first, key=lambda r: (not r.best, r.max_num_batched_tokens is not None))


def _chunk_row(row: TableRow, data: ReportData, beside: Sequence[str]) -> ChunkRow:
    trial = data.shown(row.trial)
    peak = None if row.memory_bytes is None else row.memory_bytes / 2**30
    activation = trial.median.memory.breakdown.activation_peak_bytes if trial and trial.median else None

    def of(path: str) -> float | None:
        return metric(trial.median, path) if trial is not None and trial.median is not None else None

    interval = trial.ci95.get("ttft_ms.p90") if trial else None
    return ChunkRow(
        chunk=row_name(row, trial, data.summary),
        trial=row.trial,
        label=trial_label(trial) if trial else "",
        memory=DASH if peak is None else f"{peak:.1f}",
        activation=DASH if activation is None else f"{activation / 2**30:.1f}",
        objectives=tuple(cell_value(path, of(path)) for path in beside),
        ttft=(ms(row.ttft_p50_ms), ms(row.ttft_p90_ms), ms(row.ttft_p99_ms)),
        interval=f"{ms(interval[0])} to {ms(interval[1])}" if interval else "",
        itl=(ms(of("itl_ms.p50")), ms(of("itl_ms.p99"))),
        hit_rate=percent(row.prefix_hit_rate),
        prefill_chunks=short(row.prefill_chunks_per_request),
        requests_s=short(of("request_throughput")),
        tokens_s=short(of("output_token_throughput")),
        note=row_note(trial, data.summary, best=row.best),
        best=row.best,
    )


def _trial_row(trial: Trial, best: int | None, beside: Sequence[str]) -> TrialRow:
    def of(path: str) -> float | None:
        return None if trial.median is None else metric(trial.median, path)

    cells = (
        *(cell_value(path, of(path)) for path in beside),
        *(ms(of(f"ttft_ms.{stat}")) for stat in ("p50", "p90", "p99")),
        ms(of("itl_ms.p99")),
        short(of("request_throughput")),
        percent(of("prefix_hit_rate")),
    )
    told = trial.violations or ([trial.message or trial.cause or ""] if trial.state != "completed" else trial.warnings)
    return TrialRow(
        number=trial.number,
        role=trial.role,
        label=trial_label(trial),
        state=STATE_WORDS[trial.state],
        cells=cells,
        note="; ".join(filter(None, told)),
        best=trial.number == best,
    )


def _not_measured(data: ReportData, figures: Sequence[Figure]) -> list[tuple[str, str]]:
    """(what, why) for metrics, files and figures."""
    total = sum(t.median is not None for t in data.trials)
    metrics = [
        (_metric_name(name), f"{reason.rstrip('.')} ({'every trial' if n >= total > 1 else _trials(n)}).")
        for name, reason, n in unmeasured(data.trials)
    ]
    files = [("Data on disk", sentence(text)) for text in data.missing]
    drawn = [(f"Figure “{f.title}”", sentence(f.absent)) for f in figures if f.absent]
    return [*metrics, *files, *drawn]


def _metric_name(name: str) -> str:
    return {"round": "Rounds left out", "memory": "Memory"}.get(name) or metric_title(
        name if "." in name or not name.endswith("_ms") else f"{name}.p50"
    ).removesuffix(" P50")


def _trials(n: int) -> str:
    return f"{n} trial{'' if n == 1 else 's'}"


def _time(data: ReportData) -> str:
    time = data.summary.time
    return (
        f"{_trials(len(data.trials))} in {format_duration(time.total_s)}: engine starts "
        f"{format_duration(time.engine_start_s)}, load {format_duration(time.load_s)}, "
        f"chunktune itself {format_duration(time.overhead_s)}."
    )
