"""The main job through the command itself, on the simulated engine."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import Done, alive, document, rounds, run, running, starts, wait_until

PROFILE = """\
version: 1
name: tiny
model: meta-llama/Llama-3.1-8B-Instruct
hardware: {gpu: h100_sxm, count: 1, cost_model: meta-llama/Meta-Llama-3.1-8B}
engine:
  args: {max_model_len: 4096, max_num_seqs: 16, enable_prefix_caching: true}
  startup_timeout: 2m
workload: {kind: shared-prefix, system_prompt_tokens: 256, user_prompt_tokens: [16, 48], output_tokens: [4, 8],
  concurrency: 4, requests: 24}
rounds: 2
space: {max_num_batched_tokens: [64, 256], refine: false}
references: [stock]
constraints: [failed_requests == 0]
budget: {time: 20s}
"""
SWEEP = ("sweep", "tiny.yaml", "--engine", "sim")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(PROFILE)
    return tmp_path


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """One whole sweep, looked at by several tests."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.yaml").write_text(PROFILE)
    return folder, run(*SWEEP, "--json", cwd=folder)


def assert_time_adds_up(study: Path) -> None:
    """Every second of the study is in one of its parts, and each part is the sum over its starts."""
    time_of, found = document(study / "summary.json")["time"], [s["time"] for s in starts(study)]
    parts = [time_of["engine_start_s"], time_of["load_s"], time_of["overhead_s"]]
    assert min(parts) >= 0
    assert time_of["total_s"] == pytest.approx(sum(parts))
    assert time_of["total_s"] >= sum(t["total_s"] for t in found) - 1e-6
    assert time_of["load_s"] == pytest.approx(sum(t["load_s"] for t in found))
    assert time_of["starts"] == len(found)


def test_one_start_measures_every_setting_and_three_more_decide(swept: tuple[Path, Done]) -> None:
    folder, done = swept
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("SIMULATED engine (asked for with --engine sim)")
    study = folder / "results/tiny"
    completed = [s for s in starts(study) if s["state"] == "completed"]
    assert [s["purpose"] for s in completed] == ["search", "final", "final", "final", "literal"]
    search, *finals, literal = completed
    assert search["live"]
    assert set(search["settings"]) == {"stock", 0, 1}
    assert all(s["live"] and "stock" in s["settings"] for s in finals)
    assert not literal["live"]
    for start in completed:
        cycles: dict[int, list[Any]] = {}
        for row in rounds(study):
            if row["start"] == start["number"]:
                cycles.setdefault(row["cycle"], []).append(row["setting"])
        assert start["purpose"] == "search" or len(cycles) >= 2
        assert all(len(set(each)) == len(each) for each in cycles.values()), "each setting once a cycle"


def test_summary_frozen_file_and_sentence_agree(swept: tuple[Path, Done]) -> None:
    folder, done = swept
    summary = json.loads(done.stdout)
    study = folder / "results/tiny"
    frozen = document(study / "frozen.json")
    assert summary == document(study / "summary.json")
    assert summary["schema"] == "chunktune.summary/2"
    assert summary["simulated"] is frozen["simulated"] is True
    assert summary["verdict"] == frozen["verdict"]
    assert summary["winner"] == frozen["setting"]
    assert (summary["verdict"] == "stock") == (summary["winner"] == "stock")
    assert {row["max_num_batched_tokens"] for row in summary["table"]} >= {64, 256}
    assert all(row["ttft_p90_ms"] > 0 for row in summary["table"])
    assert [row["setting"] for row in summary["table"] if row["winner"]] == [summary["winner"]]
    assert frozen["schema"] == "chunktune.frozen/2"
    assert frozen["stock"]["starts"] == 3
    assert not {"host", "port", "served_model_name", "scheduler_cls"} & set(frozen["engine_args"])
    assert_time_adds_up(study)


def test_the_folder_holds_what_the_contract_says(swept: tuple[Path, Done]) -> None:
    study = swept[0] / "results/tiny"
    for name in ("study.json", "journal.log", "rounds.jsonl", "summary.json", "frozen.json"):
        assert (study / name).is_file(), name
    for start in starts(study):
        folder = study / "starts" / f"{start['number']:04d}"
        assert start["schema"] == "chunktune.start/1"
        assert (folder / "engine.log").stat().st_size > 0
    for row in rounds(study, kept=False):
        folder = study / "starts" / f"{row['start']:04d}"
        assert row["schema"] == "chunktune.round/1"
        assert (folder / f"round-{row['round']}.requests.jsonl.gz").is_file()
        assert (folder / f"round-{row['round']}.telemetry.jsonl.gz").is_file()
    for row in rounds(study):
        assert row["measurement"]["ttft_ms"]["p50"] > 0
        assert row["measurement"]["prefix_hit_rate"] > 0.5
        assert row["measurement"]["memory"]["source"] == "simulated"


def test_the_same_command_finds_it_done(swept: tuple[Path, Done]) -> None:
    study = swept[0] / "results/tiny"

    def files() -> dict[Path, tuple[bytes, int]]:
        return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in study.rglob("*") if f.is_file()}

    before = files()
    again = run(*SWEEP, cwd=swept[0], COLUMNS="30")
    assert again.returncode == 0, again.stderr
    assert files() == before, "nothing was measured, so nothing is written"
    assert "SIMULATED" in again.stdout
    assert again.stderr.endswith("nothing was left to measure\n")


def test_what_a_missing_document_said_is_written_again(swept: tuple[Path, Done]) -> None:
    folder = swept[0]
    shutil.copytree(folder / "results/tiny", folder / "copies/tiny")
    (folder / "copies/tiny/summary.json").unlink()
    (folder / "copies/tiny/frozen.json").write_text("{}")
    done = run(*SWEEP, "--out", "copies", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    frozen = [document(folder / out / "tiny/frozen.json") for out in ("results", "copies")]
    assert all(f.pop("created_at") for f in frozen)
    assert frozen[0] == frozen[1]


def test_another_workload_is_not_mixed_in(swept: tuple[Path, Done]) -> None:
    refused = run(*SWEEP, "--set", "workload.requests=25", cwd=swept[0])
    assert refused.returncode == 2
    assert "workload.requests" in refused.stderr
    assert "--fresh" in refused.stderr


def test_freeze_refuses_a_simulated_winner_unless_allowed(swept: tuple[Path, Done]) -> None:
    refused = run("freeze", cwd=swept[0])
    assert refused.returncode == 2
    assert "--allow-simulated" in refused.stderr
    allowed = run("freeze", "--allow-simulated", cwd=swept[0])
    assert allowed.returncode == 0, allowed.stderr
    assert json.loads(allowed.stdout) == document(swept[0] / "results/tiny/frozen.json")


def test_the_committed_example_is_whole_and_left_as_it_is(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "results/reference"
    shutil.copytree(example, tmp_path / "reference")
    done = run("sweep", "quick", "--engine", "sim", "--study", "reference", "--out", tmp_path, "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for file in (f for f in example.rglob("*") if f.is_file() and f.name != ".lock"):
        assert (tmp_path / "reference" / file.relative_to(example)).read_bytes() == file.read_bytes(), file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_in_mid_sweep_loses_the_round_under_way_and_no_more(folder: Path, number: signal.Signals) -> None:
    study = folder / "results/tiny"
    with running(*SWEEP, "--set", "workload.requests=100", cwd=folder) as child:
        wait_until(lambda: len(rounds(study)) >= 2, child=child)
        child.send_signal(number)
        stderr = child.communicate(timeout=60)[1]
    wait_until(lambda: alive(folder) == [], 0 if number != signal.SIGKILL else 20)
    (start,) = starts(study)
    assert start["state"] == "interrupted"
    assert start["time"]["load_s"] >= sum(row["load_s"] for row in rounds(study)) > 0
    if number != signal.SIGKILL:
        assert child.returncode == 130, stderr
        assert "Traceback" not in stderr
        assert document(study / "summary.json")["verdict"] == "none"
        assert_time_adds_up(study)
