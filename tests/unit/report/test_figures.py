from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import studies
from tuner.domain.experiment import Contrast
from tuner.report.data import ReportData
from tuner.report.figures import Figure, all_figures
from tuner.report.figures.base import log_axis, metric_axis
from tuner.report.figures.differences import pareto_front
from tuner.report.page import csv_text

COLOURS = {"@accent": "#123456", "@ink": "#000000", "@muted": "#777777", "@soft": "#aaaaaa", "@line": "#dddddd"}


def coloured(value: Any) -> Any:
    if isinstance(value, str):
        return COLOURS.get(value, "#ff0000" if value == "@bad" else value)
    if isinstance(value, list):
        return [coloured(v) for v in value]
    return {k: coloured(v) for k, v in value.items()} if isinstance(value, dict) else value


def figure(data: ReportData, key: str) -> Figure:
    return next(f for f in all_figures(data) if f.key == key)


def trace(found: Figure, name: str) -> dict[str, Any]:
    return next(t for t in found.traces if t["name"] == name)


@pytest.mark.parametrize("kind", studies.ALL)
def test_every_figure_is_valid_plotly_and_has_its_data(kind: str) -> None:
    for found in all_figures(studies.ALL[kind]()):
        assert bool(found.traces) != bool(found.absent), found.key
        if found.absent:
            continue
        spec = coloured(found.spec)
        go.Figure(data=spec["data"], layout=spec["layout"])
        json.dumps(found.spec, allow_nan=False)
        assert "@" not in json.dumps(spec)
        rows = list(csv.reader(io.StringIO(csv_text(found))))
        assert rows[0] == found.header
        assert len(rows) > 1
        assert all(len(row) == len(found.header) for row in rows)


def test_figures_of_a_failed_study_say_why_they_are_absent() -> None:
    absent = {f.key: f.absent for f in all_figures(studies.failures_only()) if f.absent}
    assert absent["ttft-by-chunk"] == "no chunk size was measured"
    assert absent["contrasts"] == "no setting was measured beside stock"
    assert absent["importance"] == "no setting was measured"
    assert "time" not in absent


def test_a_figure_without_its_metric_gives_the_reason_of_the_measurement() -> None:
    found = figure(studies.null_metrics(), "prefix-hit-rate-by-chunk")
    assert found.absent == "the server has no /metrics"


def test_ttft_over_the_chunk_has_stock_winner_limit_and_what_cannot_run() -> None:
    found = figure(studies.normal(), "ttft-by-chunk")
    assert [row[1] for row in found.rows] == [64, 128, 256, 512, 1024, 2048, 4096]
    assert trace(found, "winner")["x"] == [2048]
    assert trace(found, "cannot run")["x"] == [32, 16384]
    assert trace(found, "cannot run")["text"][0] == "chunk 32: chunk_below_max_num_seqs"
    assert set(trace(found, "limit TTFT P99 &lt;= 280")["y"]) == {280}
    stock = studies.normal().stock
    assert stock is not None
    assert stock.median is not None
    assert stock.median.ttft_ms is not None
    assert set(trace(found, "stock")["y"]) == {stock.median.ttft_ms.p90}
    assert "limit ITL P99 &lt;= 120" in {t["name"] for t in figure(studies.normal(), "itl-by-chunk").traces}


def test_where_every_setting_varies_more_the_best_of_each_chunk_stands() -> None:
    data = studies.many()
    found = figure(data, "ttft-by-chunk")
    chunks = [row[1] for row in found.rows]
    assert chunks == sorted({s.knobs["max_num_batched_tokens"] for s in data.summary.settings if s.knobs})
    smallest = [s for s in data.summary.settings if s.knobs.get("max_num_batched_tokens") == chunks[0]]
    assert found.rows[0][3] == pytest.approx(min(s.median.ttft_ms.p90 for s in smallest), abs=1e-3)


def test_an_objective_beside_ttft_has_its_own_figure() -> None:
    keys = [f.key for f in all_figures(studies.class_objective())]
    assert "groups-short-p90-by-chunk" in keys
    assert "output-token-throughput-by-chunk" in keys


def test_contrasts_keep_search_and_finals_apart_and_the_best_on_top() -> None:
    found = figure(studies.normal(), "contrasts")
    assert len(trace(found, "finals")["x"]) == 2
    assert len(trace(found, "all rounds")["x"]) == 10
    assert found.layout["yaxis"]["ticktext"][:2] == ["chunk 2048", "chunk 4096"]
    finals = {row[1]: row[3] for row in found.rows if row[0] == "finals"}
    stated = {s.id: s.vs_stock["ttft_ms.p90"].change for s in studies.normal().summary.finals if s.id != "stock"}
    assert finals == pytest.approx(stated, abs=1e-4)
    assert "lower is better" in found.says


def test_a_contrast_without_an_interval_is_a_bare_point() -> None:
    data = studies.normal()
    lines = [
        s.model_copy(update={"vs_stock": {"ttft_ms.p90": Contrast(change=-0.2)} if s.id == 2 else {}})
        for s in data.summary.settings
    ]
    alone = replace(data, summary=data.summary.model_copy(update={"settings": lines, "finals": []}))
    (only,) = figure(alone, "contrasts").traces
    assert only["x"] == pytest.approx([0.8])
    assert only["error_x"]["array"] == pytest.approx([0.0])


def test_the_axis_of_contrasts_always_marks_stock() -> None:
    for kind in ("normal", "stock_wins", "many"):
        ticks = figure(studies.ALL[kind](), "contrasts").layout["xaxis"]
        assert 1.0 in ticks["tickvals"]
        assert len(ticks["tickvals"]) >= 2


def test_discarded_rounds_are_on_no_line() -> None:
    data = studies.normal()
    found = figure(data, "rounds")
    assert len(found.rows) == len(data.results.kept()) < len(data.results.rounds)
    assert [t["name"] for t in found.traces if t["showlegend"]] == ["chunk 2048", "stock"]


def test_memory_is_of_one_final_start() -> None:
    found = figure(studies.normal(), "memory-over-time")
    assert {row[0] for row in found.rows} == {3}
    assert [t["name"] for t in found.traces] == ["stock", "chunk 2048", "chunk 4096"]
    seconds = [row[3] for row in found.rows]
    assert seconds == sorted(seconds)


def test_without_finals_memory_is_of_the_latest_start_and_without_samples_there_is_a_reason() -> None:
    data = studies.normal()
    search = replace(data, timelines={2: data.timelines[2]})
    assert {row[0] for row in figure(search, "memory-over-time").rows} == {2}
    silent = studies.timeline(samples=0)
    silent.reason = "NVML was lost"
    mute = replace(data, timelines={3: dict.fromkeys(range(1, 10), silent)})
    assert figure(mute, "utilisation-over-time").absent == "NVML was lost"


def test_names_cannot_carry_markup_into_plotly() -> None:
    for found in all_figures(studies.hostile()):
        assert "<script" not in json.dumps(found.spec)
        assert "<img" not in json.dumps(found.spec)


def test_chunk_sizes_that_lie_close_leave_each_others_labels_legible() -> None:
    assert log_axis("chunk", [512, 768, 896, 1024, 1280, 2048, 4096])["ticktext"] == [
        "512",
        "1024",
        "2048",
        "4096",
        "768",
        "1280",
    ]
    assert log_axis("chunk", [2048])["tickvals"] == [2048]
    assert len(log_axis("chunk", range(128, 8193, 16))["tickvals"]) <= 12


def test_one_knob_has_no_importance() -> None:
    alone = replace(studies.normal(), importances={"max_num_batched_tokens": 1.0})
    assert figure(alone, "importance").absent == "the space has one knob"


def test_wide_spreads_get_a_log_axis() -> None:
    assert metric_axis("ttft_ms.p90", [60, 900])["type"] == "log"
    assert "type" not in metric_axis("ttft_ms.p90", [60, 90])
    assert "type" not in metric_axis("ttft_ms.p90", [0, 900])


points = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=30)


@given(points)
def test_nobody_beats_a_point_on_the_front_and_somebody_beats_the_rest(values: list[tuple[float, float]]) -> None:
    front = pareto_front(values)

    def beaten(i: int) -> bool:
        return any(v[0] <= values[i][0] and v[1] <= values[i][1] and v != values[i] for v in values)

    assert front
    assert not any(beaten(i) for i in front)
    on_front = {values[i] for i in front}
    assert all(beaten(i) or values[i] in on_front for i in range(len(values)))
