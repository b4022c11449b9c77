"""`summary.json`: what a study found, in numbers and in advice. Decides nothing. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tuner.domain.experiment import (
    STOCK_ID,
    Results,
    SettingId,
    SettingLine,
    SettingState,
    Start,
    StudyFile,
    StudySummary,
    StudyTime,
    TableRow,
)
from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Profile
from tuner.domain.setting import Setting
from tuner.domain.units import counted, format_duration
from tuner.study.advice import advice
from tuner.study.estimate import Evidence, setting_lines
from tuner.study.problem import Problem
from tuner.study.settings import SettingRules
from tuner.study.verdict import Decision

States = Mapping[SettingId, tuple[SettingState, str]]


def build_summary(
    study: StudyFile,
    profile: Profile,
    problem: Problem,
    results: Results,
    decision: Decision,
    *,
    states: States,
    settings: Mapping[SettingId, Setting],
) -> StudySummary:
    """The summary of what was measured; table, sentence and frozen file are made of the same decision.

    `settings` is what each id stands for, `results.elapsed_s` the time of all runs.
    """
    finals = results.numbers("final")
    lines = _lines(setting_lines(problem, results), {**_uncounted(results), **states}, settings)
    final_lines = [
        line.model_copy(update={"state": states.get(line.id, (line.state, ""))[0]})
        for line in (setting_lines(problem, results, finals) if finals else [])
    ]
    return StudySummary(
        study=study.study,
        simulated=study.simulated,
        verdict=decision.verdict,
        sentence=decision.sentence,
        winner=decision.winner,
        settings=lines,
        finals=final_lines,
        advice=advice(profile, problem, results, lines, final_lines, decision),
        starts=[_start_line(start, results) for start in results.starts],
        counts=dict(Counter(line.state for line in lines)),
        time=study_time(results),
        table=_Table(problem, results, settings, decision.winner).rows(lines, final_lines),
    )


def study_time(results: Results) -> StudyTime:
    """Where `elapsed_s` went; what its starts spent is part of it, also where a file tells less."""
    start_s = sum(s.time.engine_start_s + s.time.stop_s for s in results.starts)
    load_s = sum(s.time.load_s for s in results.starts)
    total_s = max(results.elapsed_s, start_s + load_s)
    return StudyTime(
        total_s=total_s,
        engine_start_s=start_s,
        load_s=load_s,
        overhead_s=max(total_s - start_s - load_s, 0.0),
        starts=len(results.starts),
    )


def _uncounted(results: Results) -> dict[SettingId, tuple[SettingState, str]]:
    """Settings of which no round counts, with the code of the last one."""
    kept = {r.setting for r in results.rounds if r.kept}
    return {r.setting: ("failed", r.code or "unknown") for r in results.rounds if r.setting not in kept}


def _lines(measured: Sequence[SettingLine], states: States, settings: Mapping[SettingId, Setting]) -> list[SettingLine]:
    """One line for each setting, stock first, measured or not."""
    found = {line.id: line for line in measured}
    for name, (state, cause) in states.items():
        setting = settings.get(name, Setting())
        line = found.get(name) or SettingLine(id=name, label=setting.label, knobs=setting.flat(), state=state)
        found[name] = line.model_copy(update={"state": state, "cause": cause or None})
    return sorted(
        found.values(), key=lambda line: (line.id != STOCK_ID, isinstance(line.id, str), str(line.id).zfill(9))
    )


def _start_line(start: Start, results: Results) -> str:
    """`2, final 1 of 3: completed, 9 rounds of 3 settings in 1 min 12 s`."""
    rows = [r for r in results.rounds if r.start == start.number]
    kept = [r for r in rows if r.kept]
    parts = [start.state.replace("_", " ") + (f" ({start.cause})" if start.cause else "")]
    if kept:
        parts.append(f"{counted(len(kept), 'round')} of {counted(len({r.setting for r in kept}), 'setting')}")
    if len(kept) < len(rows):
        parts.append(f"{len(rows) - len(kept)} discarded")
    return (
        f"{start.number}, {start.label or start.purpose}: {', '.join(parts)} in {format_duration(start.time.total_s)}"
    )


class _Table:
    """A row for each chunk size with the best setting that has it; stock and references have rows of their own."""

    def __init__(
        self, problem: Problem, results: Results, settings: Mapping[SettingId, Setting], winner: SettingId | None
    ) -> None:
        self._problem = problem
        self._settings = settings
        self._winner = winner
        stock_chunk = next((s.stock_chunk for s in reversed(results.starts) if s.stock_chunk), problem.default_chunk)
        self._rules = SettingRules(problem.base_args, stock_chunk)
        self._all = Evidence(problem, results, [s.number for s in results.starts])
        self._finals = Evidence(problem, results, results.numbers("final"), final=True)

    def rows(self, lines: Sequence[SettingLine], finals: Sequence[SettingLine]) -> list[TableRow]:
        """By chunk size; a setting is shown as the finals measured it, where they did."""
        in_finals = {line.id: line for line in finals}
        references = {reference.key for reference in self._problem.references}
        shown = [in_finals.get(line.id, line) for line in lines]
        alone, by_chunk = [], dict[int | None, list[SettingLine]]()
        for line in shown:
            if line.median is None:
                continue
            if line.id == STOCK_ID or self._setting(line).key in references:
                alone.append(line)
            else:
                by_chunk.setdefault(self._rules.chunk(self._setting(line)), []).append(line)
        best = [min(group, key=self._rank) for group in by_chunk.values()]
        rows = [self._row(line, self._finals if line.id in in_finals else self._all) for line in [*alone, *best]]
        return sorted(rows, key=lambda row: (row.max_num_batched_tokens or 0, row.setting != STOCK_ID))

    def _setting(self, line: SettingLine) -> Setting:
        return self._settings.get(line.id, Setting())

    def _rank(self, line: SettingLine) -> tuple[bool, bool, float]:
        """The winner first, then what may meet the limits, then the first objective."""
        objective = self._problem.objective
        value = metric(line.median, objective.metrics[0]) if line.median else None
        fits = line.p_feasible is None or line.p_feasible >= 0.5
        return line.id != self._winner, not fits, float("inf") if value is None else objective.signs[0] * value

    def _row(self, line: SettingLine, evidence: Evidence) -> TableRow:
        median = line.median or Measurement()
        ttft, peaks = median.ttft_ms, median.memory.peak_bytes
        return TableRow(
            max_num_batched_tokens=self._rules.chunk(self._setting(line)),
            setting=line.id,
            label=line.label,
            memory_bytes=max(peaks.values()) if peaks else None,
            memory_source=median.memory.source,
            ttft_p50_ms=ttft.p50 if ttft else None,
            ttft_p90_ms=ttft.p90 if ttft else None,
            ttft_p99_ms=ttft.p99 if ttft else None,
            prefix_hit_rate=median.prefix_hit_rate,
            prefill_chunks_per_request=median.prefill_chunks_per_request,
            violates=[str(check.constraint) for check in evidence.checks(line.id) if check.p < 0.5],
            winner=line.id == self._winner,
        )
