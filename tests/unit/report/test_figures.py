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
from tuner.report.figures import all_figures
from tuner.report.figures.base import metric_axis
from tuner.report.figures.search import pareto_front
from tuner.report.page import csv_text

COLOURS = {"@accent": "#123456", "@ink": "#000000", "@muted": "#777777", "@soft": "#aaaaaa", "@line": "#dddddd"}


def coloured(value: Any) -> Any:
    if isinstance(value, str):
        return COLOURS.get(value, "#ff0000" if value == "@bad" else value)
    if isinstance(value, list):
        return [coloured(v) for v in value]
    return {k: coloured(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("kind", studies.ALL)
def test_every_figure_is_valid_plotly_and_has_its_data(kind: str) -> None:
    for figure in all_figures(studies.ALL[kind]()):
        assert bool(figure.traces) != bool(figure.absent), figure.key
        if figure.absent:
            continue
        spec = coloured(figure.spec)
        go.Figure(data=spec["data"], layout=spec["layout"])
        json.dumps(figure.spec, allow_nan=False)
        assert "@" not in json.dumps(spec)
        rows = list(csv.reader(io.StringIO(csv_text(figure))))
        assert rows[0] == figure.header
        assert len(rows) > 1
        assert all(len(row) == len(figure.header) for row in rows)


def test_figures_of_a_failed_study_say_why_they_are_absent() -> None:
    absent = {f.key: f.absent for f in all_figures(studies.failures_only()) if f.absent}
    assert absent["ttft-by-chunk"] == "no chunk size has a measured TTFT"
    assert absent["importance"] == "no trial was measured"
    assert "sweep" not in absent


def test_each_chunk_stands_once_with_its_final() -> None:
    figure = next(f for f in all_figures(studies.normal()) if f.key == "ttft-by-chunk")
    chunks = [row[1] for row in figure.rows]
    assert chunks == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert figure.rows[-1][0] == 14


def test_where_every_trial_varies_more_the_best_of_each_chunk_stands() -> None:
    data = studies.thousand()
    figure = next(f for f in all_figures(data) if f.key == "ttft-by-chunk")
    chunks = [row[1] for row in figure.rows]
    assert chunks == sorted({t.knobs["max_num_batched_tokens"] for t in data.trials if t.knobs})
    smallest = [t for t in data.trials if t.knobs.get("max_num_batched_tokens") == chunks[0]]
    assert figure.rows[0][3] == pytest.approx(min(t.median.ttft_ms.p90 for t in smallest), abs=1e-3)


def test_the_winner_is_one_of_the_variants_when_it_is_one() -> None:
    data = studies.normal()
    data = replace(data, merged=[], summary=studies.summary_of(data.study, data.trials, 11))
    figure = next(f for f in all_figures(data) if f.key == "ttft-distribution")
    assert [trace["name"] for trace in figure.traces] == ["stock", "long-prefill threshold", "reuse budget (winner)"]


def test_a_missing_variant_is_named() -> None:
    figure = next(f for f in all_figures(studies.one_trial()) if f.key == "ttft-distribution")
    assert figure.says.endswith("Not in this study: long-prefill threshold, reuse budget.")


def test_names_cannot_carry_markup_into_plotly() -> None:
    for figure in all_figures(studies.hostile()):
        assert "<script" not in json.dumps(figure.spec)
        assert "<img" not in json.dumps(figure.spec)


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
