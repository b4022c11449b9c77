"""Faults of a whole sweep on the fake `vllm`: the exit code, what is named, and nothing left running.

What tells each fault apart is tested where it does: tests/unit/engine/test_diagnosis.py, tests/unit/load,
tests/unit/experiment/test_runner.py, tests/unit/study/test_faults.py, tests/integration/{engine,experiment}.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import (
    DEADLINE_S,
    FAKE_VLLM,
    Done,
    alive,
    document,
    launches,
    rounds,
    run,
    running,
    starts,
    wait_until,
)

PROFILE = """\
version: 1
name: faults
model: fake/model
engine: {args: {max_model_len: 2048, max_num_seqs: 16, max_num_batched_tokens: 512}, startup_timeout: 20s}
workload: {kind: shared-prefix, system_prompt_tokens: 128, user_prompt_tokens: [8, 16], output_tokens: [3, 5],
  concurrency: 2, requests: 8, request_timeout: 3s}
rounds: 1
space: {max_num_batched_tokens: [256, 1024], refine: false}
budget: {time: 8s}
"""
"""After one cycle the time is up, but for the finals."""
STEADY: dict[str, Any] = {"ttft_ms": 20, "ttft_ms_by_chunk": {"512": 40}, "token_ms": 3}
"""Slow enough that a busy test machine is no limit to the client."""


def sweep(folder: Path, *words: str, **script: Any) -> Done:
    """The sweep with these faults, which leaves no process and no traceback, whatever became of it."""
    (folder / "faults.yaml").write_text(PROFILE)
    done = run("sweep", "faults.yaml", "--vllm", FAKE_VLLM, *words, cwd=folder, script={**STEADY, **script})
    assert alive(folder) == []
    assert "Traceback" not in done.stderr
    return done


def settings(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of the summary by their label."""
    return {s["label"]: s for s in document(folder / "results/faults/summary.json")["settings"]}


def test_a_chunk_that_cannot_start_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    done = sweep(tmp_path, start=[{"log": "kv_cache_too_small", "exit": 1, "chunk_above": 600}])
    assert done.returncode == 0, done.stderr
    found = settings(tmp_path)
    assert (found["chunk 1024"]["state"], found["chunk 1024"]["cause"]) == ("infeasible", "kv_cache_too_small")
    assert found["chunk 256"]["rounds"] > 0
    assert found["stock"]["rounds"] > 0
    assert "chunk 1024" in done.stdout


def test_a_setting_that_kills_the_engine_does_not_end_the_sweep(tmp_path: Path) -> None:
    done = sweep(tmp_path, load=[{"exit": 1, "log": "died_under_load", "chunk_below": 300}])
    assert done.returncode == 0, done.stderr
    found = starts(tmp_path / "results/faults")
    dead = [s for s in found if s["state"] == "engine_failed"]
    assert {(s["cause"], s["failed_setting"]) for s in dead} == {("engine_died", 0)}
    assert settings(tmp_path)["chunk 1024"]["rounds"] > 0
    assert [s["state"] for s in found if s["purpose"] == "final"] == ["completed"] * 3


@pytest.mark.parametrize(
    ("script", "code", "engines", "words"),
    [
        ({"unknown_options": ["max-num-seqs"]}, 2, 0, "--max-num-seqs"),
        ({"start": [{"log": "missing_model", "exit": 1}]}, 2, 1, "no/such-model"),
        ({"start": [{"log": "gated_model", "exit": 1, "after_s": 0.3}], "core": "stubborn"}, 3, 1, "gated"),
        ({"api_key": "k"}, 3, 1, "401"),
    ],
    ids=["unknown option", "missing model", "gated model", "wants a key"],
)
def test_what_no_other_setting_would_change_ends_the_sweep(
    tmp_path: Path, script: dict[str, Any], code: int, engines: int, words: str
) -> None:
    done = sweep(tmp_path, **script)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert launches(tmp_path) == engines
    assert not (tmp_path / "results/faults/frozen.json").exists()


def test_without_live_control_each_start_measures_one_setting(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--no-live", "--budget", "2m")
    assert done.returncode == 0, done.stderr
    found = starts(tmp_path / "results/faults")
    assert all(not s["live"] and len(s["settings"]) == 1 for s in found)
    assert {s["engine_args"]["max_num_batched_tokens"] for s in found} == {256, 512, 1024}
    assert "cannot be switched within an engine start (--no-live)" in done.stderr.splitlines()[0]


def test_a_version_that_is_not_known_is_not_switched(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--dry-run", version="0.29.1")
    assert done.returncode == 0, done.stderr
    assert "0.29.1" in done.stderr.splitlines()[0]
    assert "LiveScheduler" not in done.stdout
    assert launches(tmp_path) == 0


def test_a_killed_sweep_whose_engine_is_stubborn_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "faults.yaml").write_text(PROFILE)
    words = ("sweep", "faults.yaml", "--vllm", FAKE_VLLM)
    study = tmp_path / "results/faults"
    with running(*words, cwd=tmp_path, script={**STEADY, "core": "stubborn", "ignore_term": True}) as child:
        wait_until(lambda: len(rounds(study)) >= 2, child=child)
        child.send_signal(signal.SIGKILL)
    kept, orphans = rounds(study), alive(tmp_path)
    assert orphans, "the engine ignores SIGTERM, so it is still there"
    # A lock that a kill can leave behind must not cost the half minute that Optuna would wait for it.
    Path(f"{study}/journal.log.lock").unlink(missing_ok=True)
    Path(f"{study}/journal.log.lock").symlink_to(study / "journal.log")

    done = sweep(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a killed run had left behind" in done.stderr
    assert "continuing: " in done.stderr
    assert all(str(pid) in done.stderr for pid in orphans)
    assert rounds(study)[: len(kept)] == kept
    assert starts(study)[0]["state"] == "interrupted"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_goes_away_under_a_sweep_is_said(tmp_path: Path, replaced: bool) -> None:
    (tmp_path / "faults.yaml").write_text(PROFILE)
    study = tmp_path / "results/faults"
    with running("sweep", "faults.yaml", "--vllm", FAKE_VLLM, cwd=tmp_path, script=STEADY) as child:
        wait_until(lambda: starts(study), child=child)
        shutil.move(study, tmp_path / "elsewhere")
        if replaced:
            study.write_text("a file of somebody else")
        stderr = child.communicate(timeout=DEADLINE_S)[1]
    assert child.returncode == 2, stderr
    assert "was removed or replaced while the sweep ran" in stderr or "Move it out of the way" in stderr
    assert not replaced or study.read_text() == "a file of somebody else"
    assert alive(tmp_path) == []


def test_nothing_within_the_limits_is_no_verdict(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--set", "constraints=[ttft_ms.p99 <= 0.5]")
    assert done.returncode == 4, done.stderr
    assert "ttft_ms.p99 <= 0.5" in done.stderr
    assert document(tmp_path / "results/faults/summary.json")["verdict"] == "none"
    assert not (tmp_path / "results/faults/frozen.json").exists()
