from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import studies
from tuner.cli.report import collect, report
from tuner.domain.observation import ClientStats, RequestRecord, RoundObservation
from tuner.errors import FileFormatError, UsageError
from tuner.experiment.store import Store, read_study
from tuner.files import write_json
from tuner.report.data import ReportData


def observation(ttft_s: float) -> RoundObservation:
    records = [
        RequestRecord(
            index=i,
            phase="cold" if i == 0 else "measured",
            intended_s=100.0 + i,
            sent_s=100.0 + i,
            first_token_s=100.0 + i + ttft_s,
            last_token_s=100.0 + i + ttft_s + 0.2,
        )
        for i in range(4)
    ]
    client = ClientStats(late_sends_p99_ms=0.1, max_in_flight=1, asked_in_flight=1, loop_lag_p99_ms=0.1, limited=False)
    return RoundObservation(records, client, started_s=100.0, measured_from_s=101.0, measured_to_s=104.0)


def on_disk(data: ReportData, folder: Path, *, rounds: bool = True) -> Store:
    store = Store(folder)
    write_json(store.study_file, data.study.to_json())
    write_json(store.summary_file, data.summary.to_json())
    for start in data.results.starts:
        store.write_start(start)
    for row in data.results.rounds:
        store.append_round(row)
        if rounds:
            store.write_round_data(row.start, row.round, observation(0.05 * row.start), studies.timeline(samples=5))
    return store


def test_a_folder_becomes_the_same_report(tmp_path: Path) -> None:
    data = studies.normal()
    found = collect(read_study(on_disk(data, tmp_path / "s").path))
    assert found.results.starts == data.results.starts
    assert found.results.rounds == data.results.rounds
    assert found.summary == data.summary
    assert found.ttfts_ms["stock"] == pytest.approx([150] * 9 + [200] * 9 + [250] * 9)
    assert set(found.timelines) == {3, 4, 5}
    assert len(found.timelines[3][9].samples) == 5 * len(studies.DEVICES)
    assert found.missing == []
    assert found.importances_reason == "the study keeps no journal.log in its folder"


def test_lost_rounds_are_said_and_not_fatal(tmp_path: Path) -> None:
    found = collect(read_study(on_disk(studies.normal(), tmp_path / "s", rounds=False).path))
    assert len(found.missing) == 27
    assert found.missing[0].startswith("Start 3, round 1: ")
    assert "does not exist" in found.missing[0]
    assert found.ttfts_ms == {}


def test_without_finals_the_search_is_shown(tmp_path: Path) -> None:
    found = collect(read_study(on_disk(studies.unfinished(), tmp_path / "s").path))
    assert set(found.timelines) == {1}
    assert len(found.ttfts_ms["stock"]) == 6


def test_a_study_under_way_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = on_disk(studies.unfinished(), tmp_path / "s")
    store.summary_file.unlink()
    assert report(store.path) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == store.path / "report.html"
    html = path.read_text().replace("\u00a0", " ")
    assert "No verdict yet: the study has not ended, 2 rounds of 1 setting measured so far." in html
    assert 'id="chunks"' in html


def test_the_wrong_folder_or_target_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        report(tmp_path / "nothing")
    with pytest.raises(FileFormatError, match=r"study\.json is missing"):
        report(tmp_path)
    store = on_disk(studies.unfinished(), tmp_path / "s")
    with pytest.raises(UsageError, match="is a folder"):
        report(store.path, tmp_path)


def test_a_report_replaces_reports_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = on_disk(studies.unfinished(), tmp_path / "s")
    with pytest.raises(FileFormatError, match=r"study\.json exists and was not written by chunktune"):
        report(store.path, store.study_file)
    read_study(store.path)
    assert report(store.path) == report(store.path) == 0
