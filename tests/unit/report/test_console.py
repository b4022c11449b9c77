from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.fakes import studies
from tuner.report.console import closing_table
from tuner.report.data import ReportData


def shown(data: ReportData, width: int, *, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="truecolor" if color else None)
    console.print(closing_table(data.summary, data.study))
    return out.getvalue()


@pytest.mark.parametrize("kind", studies.ALL)
@pytest.mark.parametrize("width", [60, 80, 118, 160])
def test_every_study_fits_every_width(kind: str, width: int) -> None:
    text = shown(studies.ALL[kind](), width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_narrow_keeps_every_figure_whole() -> None:
    text = shown(studies.normal(), 60)
    row = next(line for line in text.splitlines() if line.startswith("*"))
    assert row.split()[1] == "2048"
    assert "95.8" in row
    assert row.split()[-1] == "71.1"
    assert "…" not in text


def test_wide_marks_winner_stock_and_broken_limits() -> None:
    lines = shown(studies.normal(), 160).splitlines()
    assert any(line.startswith("*") and "winner" in line and " 2048 " in line for line in lines)
    assert any(line.startswith("!") and "breaks ttft_ms.p99 <= 280" in line and " 64 " in line for line in lines)
    assert any(line.startswith("s ") and "stock (8192)" in line for line in lines)
    assert any("2048+" in line and "max_cached_blocks 128, min_reuse_ratio 0.8" in line for line in lines)


def test_stock_as_the_winner_has_both_marks() -> None:
    assert any(line.startswith("*s ") and "stock" in line for line in shown(studies.stock_wins(), 80).splitlines())


def test_the_legend_explains_no_mark_that_is_not_there() -> None:
    assert "* winner  s stock  ! breaks a limit  + other knobs too" in shown(studies.normal(), 160)
    legend = shown(studies.unfinished(), 100)
    assert "s stock" in legend
    assert not re.search("winner|breaks|other knobs", legend)


@pytest.mark.parametrize("width", [80, 140])
def test_what_is_optimized_has_a_column(width: int) -> None:
    data = studies.class_objective()
    text = shown(data, width)
    head = next(line for line in text.splitlines() if "chunk" in line)
    assert "obj. 1" in head
    assert "obj. 2" in head
    row = next(line for line in text.splitlines() if line.lstrip().startswith("*"))
    winner = data.compared
    assert winner is not None
    assert winner.median is not None
    assert f"{winner.median.groups['short'].p90:.0f}" in row.split()
    assert f"{winner.median.output_token_throughput:.0f} tok/s" in row
    assert "obj. 1: TTFT of short P90 obj. 2: output throughput" in " ".join(text.split())


def test_one_objective_is_called_that_and_a_usual_one_has_its_own_column() -> None:
    data = studies.class_objective()
    profile = {**data.study.profile, "objective": {"minimize": "groups.short.p90"}}
    alone = replace(data, study=data.study.model_copy(update={"profile": profile}))
    assert "objective: TTFT of short P90" in shown(alone, 140)
    assert "objective" not in shown(studies.normal(), 140)


@pytest.mark.parametrize("kind", ["normal", "stock_wins", "failures_only", "unfinished"])
def test_the_sentence_of_the_summary_is_the_answer(kind: str) -> None:
    data = studies.ALL[kind]()
    assert f"{data.summary.sentence}." in " ".join(shown(data, 400).split())


def test_what_could_not_run_is_named_with_its_cause_then_advice_and_time() -> None:
    lines = shown(studies.normal(), 200).splitlines()
    assert lines[-4:] == [
        "Cannot run: chunk 32 (chunk_below_max_num_seqs)",
        "Cannot run: chunk 16384 (no_memory_for_kv)",
        "Note: NVML memory does not tell these settings apart: vLLM preallocates its KV pool.",
        "25 min 00 s: 6 engine starts 11 min 30 s, load 12 min 00 s, overhead 1 min 30 s. "
        "Settings: 7 measured, 4 eliminated, 2 cannot run.",
    ]
    assert "Failed: chunk 128; chunk 256; chunk 512 (gated_model)" in shown(studies.failures_only(), 200)


def test_simulated_is_said_and_only_then() -> None:
    assert shown(studies.simulated(), 100).count("SIMULATED") >= 2
    assert "SIMULATED" not in shown(studies.normal(), 100)


def test_missing_numbers_are_dashes() -> None:
    text = shown(studies.null_metrics(), 140)
    assert "–" in text
    assert "nan" not in text.lower()
    assert "None" not in text


def test_no_color_means_no_colour_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|9[0-7])[;m]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert colour.search(shown(studies.normal(), 100, color=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(shown(studies.normal(), 100, color=True))
    assert "\x1b" not in shown(studies.normal(), 100)


def test_markup_in_names_is_text() -> None:
    data = studies.normal()
    table = [r.model_copy(update={"label": "[bold red]x[/]"}) if r.winner else r for r in data.summary.table]
    marked = replace(data, summary=data.summary.model_copy(update={"table": table}))
    assert "[bold red]x[/]" in shown(marked, 140)
