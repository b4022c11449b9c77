"""An experiment's folder: what is written is read again, and damage is named, never a traceback."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tuner.domain.experiment import Fingerprint, Round, Start, StartTime, StudyFile, StudySummary, StudyTime
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.observation import ClientStats, MemorySample, MemoryTimeline, RequestRecord, RoundObservation
from tuner.domain.setting import STOCK, Setting
from tuner.errors import FileFormatError, UsageError
from tuner.experiment.store import KILLED, Store, newest_study, read_study

STUDY = StudyFile(
    study="s",
    profile={"name": "p"},
    fingerprint=Fingerprint(model="m", engine="sim"),
    workload_sha256="0",
    engine_kind="sim",
    simulated=True,
    versions={},
    seed=0,
    created_at="2026-01-01T00:00:00+00:00",
)


def start(number: int, **more: Any) -> Start:
    fields: dict[str, Any] = {
        "purpose": "search",
        "state": "completed",
        "engine_args": {"max_num_seqs": 64},
        "settings": ["stock", 3],
        "defined": {"stock": STOCK, "3": Setting(knobs={"max_num_batched_tokens": 512})},
    }
    return Start(number=number, **{**fields, **more})


def row(start_number: int, number: int, **more: Any) -> Round:
    latency = Latency(p50=50.0, p90=80.0, p99=99.0, mean=55.0, n=100)
    fields: dict[str, Any] = {
        "cycle": 0,
        "position": 0,
        "setting": "stock",
        "state": "kept",
        "measurement": Measurement(ttft_ms=latency),
    }
    return Round(start=start_number, round=number, **{**fields, **more})


def study(path: Path) -> Store:
    store = Store(path)
    store.path.mkdir(parents=True, exist_ok=True)
    store.study_file.write_text(json.dumps(STUDY.to_json()))
    return store


def summarized(store: Store, total_s: float, starts: int) -> StudySummary:
    time = StudyTime(total_s=total_s, engine_start_s=0.0, load_s=0.0, overhead_s=total_s, starts=starts)
    summary = StudySummary(study="s", simulated=True, verdict="none", sentence="", winner=None, time=time)
    store.summary_file.write_text(json.dumps(summary.to_json()))
    return summary


def test_starts_and_rounds_are_read_as_they_were_written(tmp_path: Path) -> None:
    store = study(tmp_path)
    starts = [start(1), start(2, state="engine_failed", cause="oom", message="out of memory")]
    rounds = [row(1, 1), row(1, 2, setting=3, state="discarded", reason="warm cache", code="warm_cache"), row(2, 1)]
    for one in reversed(starts):
        store.write_start(one)
    for each in rounds:
        store.append_round(each)
    found = read_study(tmp_path)
    assert (found.results.starts, found.results.rounds) == (starts, rounds)
    assert (found.study, found.summary) == (STUDY, None)


def test_an_empty_folder_has_no_results(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert store.results().starts == store.results().rounds == store.settle() == []
    assert store.next_start_number() == 1


def test_a_round_that_a_kill_cut_off_is_lost_and_no_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_start(start(1))
    store.append_round(row(1, 1))
    with store.rounds_file.open("ab") as file:
        file.write(b'{"schema": "chunktune.round/1", "start": 1, "rou')
    assert [r.round for r in store.results().rounds] == [1]
    store.append_round(row(1, 2))
    assert [r.round for r in store.results().rounds] == [1, 2]


def test_rows_of_a_start_that_is_not_there_count_for_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_start(start(1))
    store.append_round(row(1, 1))
    store.append_round(row(7, 1))
    assert [r.start for r in store.results().rounds] == [1]
    assert store.next_start_number() == 8


def test_a_start_that_left_only_a_log_keeps_its_number(tmp_path: Path) -> None:
    for name in ("0003", "²", "notes"):
        (tmp_path / "starts" / name).mkdir(parents=True)
    store = Store(tmp_path)
    assert store.next_start_number() == 4
    assert store.results().starts == []
    assert store.engine_log(4) == tmp_path / "starts" / "0004" / "engine.log"


def test_a_start_that_a_kill_left_open_is_settled_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_start(start(1))
    store.write_start(start(2, state="interrupted", message="interrupted by SIGTERM"))
    store.write_start(start(3, state="interrupted"))
    assert [s.number for s in store.settle()] == [3]
    assert store.settle() == []
    assert [s.message for s in store.results().starts] == [None, "interrupted by SIGTERM", KILLED]


def test_time_of_earlier_runs_is_counted_once(tmp_path: Path) -> None:
    store = study(tmp_path)
    for number in (1, 2, 3):
        store.write_start(start(number, time=StartTime(total_s=10.0)))
    assert store.results().elapsed_s == 30.0
    summary = summarized(store, total_s=25.0, starts=2)
    assert store.summary() == summary
    assert store.results().elapsed_s == 35.0


def test_a_round_s_data_come_back_in_seconds_since_it_began(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = RequestRecord(
        0, "measured", 100.5, 100.5, first_token_s=100.6, finished_s=101.0, token_gaps_ms=[20.0], group="chat"
    )
    observation = RoundObservation(
        records=[record],
        client=ClientStats(0.1, 1, 1, 0.1, limited=False),
        started_s=100.0,
        measured_from_s=100.5,
        measured_to_s=101.0,
    )
    sample = MemorySample(100.25, "GPU-0", 70, utilization=0.5)
    store.write_round_data(1, 2, observation, MemoryTimeline("nvml", [sample], {"GPU-0": 80}, ""))
    (read,) = store.read_requests(1, 2)
    assert (read.sent_s, read.first_token_s, read.group, read.token_gaps_ms) == (0.5, 0.6, "chat", [20.0])
    again = store.read_observation(1, 2)
    assert (again.measured_from_s, again.measured_to_s) == (0.5, 1.0)
    telemetry = store.read_telemetry(1, 2)
    assert (telemetry.source, telemetry.total_bytes) == ("nvml", {"GPU-0": 80})
    assert telemetry.samples == [MemorySample(0.25, "GPU-0", 70, utilization=0.5)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        gzip.compress(b'{"source": "nvml"}\n' * 50)[:-20],
        gzip.compress(bytes(range(256)), mtime=0)[:12] + b"\xff" * 40,
        gzip.compress(b"[]\n"),
        gzip.compress(b"null\n"),
        gzip.compress(b"{}\n"),
        gzip.compress(b'{"source": "nvml"}\n{"at_s": "x"}\n'),
    ],
    ids=["empty", "cut off", "damaged", "list", "null", "no fields", "wrong type"],
)
def test_damaged_data_of_a_round_are_named(tmp_path: Path, data: bytes) -> None:
    store = Store(tmp_path)
    folder = store.start_dir(3)
    folder.mkdir(parents=True)
    (folder / "round-1.telemetry.jsonl.gz").write_bytes(data)
    (folder / "round-1.requests.jsonl.gz").write_bytes(data)
    with pytest.raises(FileFormatError, match=r"round-1\.telemetry\.jsonl\.gz is damaged"):
        store.read_telemetry(3, 1)
    if data:
        with pytest.raises(FileFormatError, match=r"round-1\.requests\.jsonl\.gz is damaged"):
            store.read_requests(3, 1)


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append_round(row(1, 1))
    store.rounds_file.write_text('{"schema": "chunktune.round/0"}\n' + store.rounds_file.read_text())
    with pytest.raises(FileFormatError, match=r"rounds\.jsonl, row 1: schema"):
        store.results()


@pytest.mark.parametrize("trials", [True, False])
def test_a_study_of_an_earlier_chunktune_is_refused_by_name(tmp_path: Path, trials: bool) -> None:
    if trials:
        (tmp_path / "trials").mkdir()
    (tmp_path / "study.json").write_text('{"schema": "chunktune.study/1"}')
    for read in (Store(tmp_path).study, Store(tmp_path).results, lambda: read_study(tmp_path)):
        with pytest.raises(FileFormatError, match=r"earlier chunktune \(chunktune\.study/1\)") as caught:
            read()
        assert "--fresh" in caught.value.hint
        assert "--study NAME" in caught.value.hint


def test_a_folder_without_a_study_names_those_below_it(tmp_path: Path) -> None:
    study(tmp_path / "one")
    with pytest.raises(FileFormatError, match="holds no study") as caught:
        read_study(tmp_path)
    assert "one" in caught.value.hint
    with pytest.raises(UsageError, match="is no folder"):
        read_study(tmp_path / "two")


def test_the_newest_study_is_the_one_written_to_last(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no study below"):
        newest_study(tmp_path)
    older, newer = study(tmp_path / "a"), study(tmp_path / "b")
    os.utime(older.study_file, (100, 100))
    os.utime(newer.study_file, (200, 200))
    assert newest_study(tmp_path) == newer.path
    older.append_round(row(1, 1))
    assert newest_study(tmp_path) == older.path
