from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import studies
from tuner.cli.report import collect, report
from tuner.domain.observation import ClientStats, RequestRecord, RoundObservation
from tuner.errors import FileFormatError, UsageError
from tuner.files import write_json
from tuner.report.data import ReportData
from tuner.experiment.store import StudyDirectory, read_study


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


def on_disk(data: ReportData, folder: Path, *, rounds: bool = True) -> StudyDirectory:
    directory = StudyDirectory(folder)
    write_json(directory.study_file, data.study.to_json())
    write_json(directory.summary_file, data.summary.to_json())
    for trial in data.trials:
        directory.write_trial(trial)
        for number in range(1, len(trial.rounds) + 1) if rounds else ():
            seen = observation(0.05 * number)
            directory.write_round(trial.number, number, seen, studies.timeline(512, from_s=100.0, samples=5))
    return directory


def test_a_folder_becomes_the_same_report(tmp_path: Path) -> None:
    data = studies.normal()
    found = collect(read_study(on_disk(data, tmp_path / "s").path))
    assert list(found.trials) == list(data.trials)
    assert found.ttfts_ms[0] == pytest.approx([50, 50, 50, 100, 100, 100, 150, 150, 150])
    assert [n for n, _ in found.timelines[0]] == [1, 2, 3]
    assert len(found.timelines[0][0][1].samples) == 5 * len(studies.DEVICES)
    assert [t.number for t in found.merged] == [14, 15]
    assert found.missing == []
    assert found.importances_reason == "the study keeps no journal.log in its folder"


def test_lost_rounds_are_said_and_not_fatal(tmp_path: Path) -> None:
    found = collect(read_study(on_disk(studies.normal(), tmp_path / "s", rounds=False).path))
    assert any(text.startswith("Trial 0, round 1: ") and "does not exist" in text for text in found.missing)
    assert found.ttfts_ms.get(0, []) == []


def test_a_study_under_way_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = on_disk(studies.one_trial(), tmp_path / "s")
    directory.summary_file.unlink()
    assert report(directory.path) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == directory.path / "report.html"
    html = path.read_text().replace("\u00a0", " ")
    assert "No winner yet: 1 trial measured" in html
    assert 'id="chunks"' in html


def test_the_wrong_folder_or_target_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        report(tmp_path / "nothing")
    with pytest.raises(FileFormatError, match=r"study\.json is missing"):
        report(tmp_path)
    directory = on_disk(studies.one_trial(), tmp_path / "s")
    with pytest.raises(UsageError, match="is a folder"):
        report(directory.path, tmp_path)


def test_a_report_replaces_reports_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = on_disk(studies.one_trial(), tmp_path / "s")
    with pytest.raises(FileFormatError, match=r"study\.json exists and was not written by chunktune"):
        report(directory.path, directory.study_file)
    read_study(directory.path)
    assert report(directory.path) == report(directory.path) == 0
