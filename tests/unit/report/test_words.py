from __future__ import annotations

import pytest

from tests.fakes import studies
from tuner.domain.experiment import TableRow
from tuner.report.words import constraints_of, line_of, objective_of, row_name, row_note


@pytest.mark.parametrize(
    ("setting", "label", "chunk", "name", "note"),
    [
        (3, "chunk 512", 512, "512", ""),
        (4, "chunk 512, min_reuse_ratio 0.8", 512, "512+", "min_reuse_ratio 0.8"),
        ("stock", "stock", 8192, "stock (8192)", "stock"),
        ("stock", "stock", None, "stock", "stock"),
        (5, "no_chunking", 8192, "no_chunking (8192)", ""),
        (6, "block_size 32", None, "block_size 32", ""),
    ],
)
def test_a_row_is_named_by_its_chunk_or_by_what_it_is(
    setting: int | str, label: str, chunk: int | None, name: str, note: str
) -> None:
    row = TableRow(max_num_batched_tokens=chunk, setting=setting, label=label)
    assert (row_name(row), row_note(row)) == (name, note)
    worst = row.model_copy(update={"winner": True, "violates": ["itl_ms.p99 <= 1", "x"]})
    assert row_note(worst) == ", ".join(filter(None, ["winner", note, "breaks itl_ms.p99 <= 1"]))


def test_a_setting_is_told_by_its_finals_where_they_measured_it() -> None:
    summary = studies.normal().summary
    assert line_of(summary, 5) in summary.finals
    assert line_of(summary, 0) in summary.settings
    assert line_of(summary, 99) is None
    unmeasured = summary.finals[1].model_copy(update={"median": None})
    lost = summary.model_copy(update={"finals": [unmeasured]})
    assert line_of(lost, 5) in summary.settings


def test_a_profile_of_another_version_still_has_a_report() -> None:
    study = studies.study_file()
    odd = {"objective": {"minimize": "speed"}, "constraints": ["ttft_ms.p99 <= 280", "be quick", 3]}
    strange = study.model_copy(update={"profile": odd})
    assert objective_of(strange).metrics == ["ttft_ms.p90"]
    assert [str(c) for c in constraints_of(strange)] == ["ttft_ms.p99 <= 280"]
