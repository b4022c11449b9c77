from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.fakes import studies
from tuner.domain.experiment import TableRow
from tuner.report.console import closing_table
from tuner.report.data import ReportData


def shown(data: ReportData, width: int, *, color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, color_system="truecolor" if color else None)
    console.print(closing_table(data.summary, data.study, data.trials))
    return out.getvalue()


@pytest.mark.parametrize("kind", studies.ALL)
@pytest.mark.parametrize("width", [60, 80, 118, 160])
def test_every_study_fits_every_width(kind: str, width: int) -> None:
    if kind == "thousand" and width != 80:
        pytest.skip("one width is enough for a thousand rows")
    text = shown(studies.ALL[kind](), width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_narrow_keeps_every_figure_whole() -> None:
    text = shown(studies.normal(), 60)
    row = next(line for line in text.splitlines() if line.startswith("*"))
    assert row.split()[1] == "8192"
    assert "95.8" in row
    assert row.split()[-1] == "71.1"
    assert "…" not in text


def test_wide_marks_winner_baseline_and_broken_limits() -> None:
    lines = shown(studies.normal(), 140).splitlines()
    assert any("winner" in line and "8192" in line for line in lines)
    assert any("ttft_ms.p99 <= 280" in line and " 64 " in line for line in lines)
    assert any("reference" in line and "no_chunking" in line for line in lines)


@pytest.mark.parametrize(("width", "titles"), [(80, ["obj. 1", "obj. 2"]), (140, ["obj. 1", "obj. 2"])])
def test_what_is_optimized_has_a_column(width: int, titles: list[str]) -> None:
    data = studies.class_objective()
    text = shown(data, width)
    head = next(line for line in text.splitlines() if "chunk" in line)
    assert [title for title in titles if title in head] == titles
    row = next(line for line in text.splitlines() if line.lstrip().startswith("*"))
    winner = next(t for t in data.trials if t.number == data.summary.best)
    assert winner.median is not None
    throughput = winner.median.output_token_throughput
    assert f"{winner.median.groups['short'].p90:.0f}" in row.split()
    assert f"{throughput:.0f} tok/s" in row
    assert "obj. 1: TTFT of short P90 obj. 2: output throughput" in " ".join(text.split())


def test_a_row_that_breaks_a_limit_is_marked_at_every_width() -> None:
    data = studies.normal()
    stock = next(row.trial for row in data.summary.table if row.label == "stock")
    trials = [
        t.model_copy(update={"violations": ["itl_ms.p99 <= 1: 36"]}) if t.number == stock else t for t in data.trials
    ]
    broken = replace(data, trials=trials)
    for width in (60, 140):
        text = shown(broken, width)
        assert any(line.lstrip().startswith("b!") for line in text.splitlines())
        assert any(line.lstrip().startswith("!") and " 64 " in line for line in text.splitlines())
        assert "! breaks a limit" in " ".join(text.split())
    assert "baseline, outside itl_ms.p99 <= 1" in shown(broken, 160)


def test_the_legend_explains_no_mark_that_is_not_there() -> None:
    data = studies.one_trial()
    row = TableRow(max_num_batched_tokens=512, trial=0, ttft_p90_ms=80.0)
    summary = data.summary.model_copy(update={"table": [row], "baseline": 7})
    legend = shown(replace(data, summary=summary), 100)
    assert "baseline" not in legend
    assert "winner" not in legend.replace("No winner yet", "")


def test_one_objective_is_called_that_and_a_usual_one_has_its_own_column() -> None:
    data = studies.class_objective()
    profile = {**data.study.profile, "objective": {"minimize": "groups.short.p90"}}
    alone = replace(data, study=data.study.model_copy(update={"profile": profile}))
    assert "objective: TTFT of short P90" in shown(alone, 140)
    assert "objective" not in shown(studies.normal(), 140)


def test_the_answer_is_one_sentence_with_its_interval() -> None:
    text = " ".join(shown(studies.normal(), 200).split())
    assert "Take chunk 8192: TTFT P90 of " in text
    assert "lower than the stock configuration's" in text
    assert "95 % interval −" in text


def test_simulated_is_said_and_only_then() -> None:
    assert shown(studies.simulated(), 100).count("SIMULATED") >= 2
    assert "SIMULATED" not in shown(studies.normal(), 100)


def test_failures_are_grouped_by_cause_with_the_mend() -> None:
    text = " ".join(shown(studies.failures_only(), 200).split())
    assert "3 x gated_model (trials 0, 1, 2)" in text
    assert "Set HF_TOKEN." in text
    assert "No answer: none of 4 trials could be measured" in text


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
    data = studies.normal(model="m")
    trials = [t.model_copy(update={"label": "[bold red]x[/]"}) if t.number == 14 else t for t in data.trials]
    summary = studies.summary_of(data.study, trials, 14)
    assert "[bold red]x[/]" in shown(ReportData(data.study, summary, trials), 100)
