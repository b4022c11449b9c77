"""The main job through the command itself, on the simulated engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

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
space:
  max_num_batched_tokens: [64, 256]
constraints: [failed_requests == 0]
"""
DEADLINE_S = 180


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(PROFILE)
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tuner", *map(str, arguments)]


def run(*arguments: object, cwd: Path, wait_s: float = DEADLINE_S, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )


def trials(study: Path) -> list[dict[str, Any]]:
    return [json.loads(f.read_text()) for f in sorted(study.glob("trials/*/trial.json"))]


def scored(study: Path) -> list[dict[str, Any]]:
    """The trials but those that a busy machine spoiled, which the sweep repeats on a fresh start."""
    return [t for t in trials(study) if t["cause"] != "client_limited"]


def candidate_under_way(study: Path) -> bool:
    """Whether a candidate has measured its first round and not its last."""
    return any(t["role"] == "candidate" and t["state"] == "interrupted" for t in trials(study))


def engines_below(folder: Path) -> list[int]:
    """Engines whose log lies below `folder`: only this test's own."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if "tuner.sim" not in line:
            continue
        try:
            logs = [f.path for f in process.open_files()] + [os.readlink(f"/proc/{process.pid}/fd/1")]
        except (psutil.Error, OSError):
            continue
        if any(str(folder) in path for path in logs):
            found.append(process.pid)
    return found


def wait_until(condition: Any, wait_s: float = 60.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One whole sweep, looked at by several tests."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.yaml").write_text(PROFILE)
    return folder, run("sweep", "tiny.yaml", "--engine", "sim", "--json", cwd=folder)


def test_a_sweep_finds_a_winner_and_freezes_it(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = swept
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("SIMULATED engine (asked for with --engine sim)")
    summary = json.loads(done.stdout)
    study = folder / "results/tiny"
    assert summary == json.loads((study / "summary.json").read_text())
    assert summary["schema"] == "chunktune.summary/1"
    assert summary["simulated"] is True
    best = next(t for t in summary["trials"] if t["number"] == summary["best"])
    assert best["role"] == "final"
    assert {row["max_num_batched_tokens"] for row in summary["table"]} >= {64, 256}
    assert all(row["ttft_p90_ms"] > 0 for row in summary["table"])
    assert sum(row["best"] for row in summary["table"]) == 1
    assert "ttft_ms.p90" in summary["improvement"]
    assert summary["time"]["total_s"] >= summary["time"]["load_s"] > 0


def test_the_folder_holds_what_the_contract_says(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    study = swept[0] / "results/tiny"
    for name in ("study.json", "journal.log", "summary.json", "frozen.json"):
        assert (study / name).is_file(), name
    found = trials(study)
    assert found[0]["role"] == "baseline"
    assert [t["number"] for t in found] == list(range(len(found)))
    for trial in found:
        folder = study / "trials" / f"{trial['number']:04d}"
        assert trial["schema"] == "chunktune.trial/1"
        assert (folder / "engine.log").stat().st_size > 0
        for number in range(1, len(trial["rounds"]) + 1):
            assert (folder / f"round-{number}.requests.jsonl.gz").is_file()
            assert (folder / f"round-{number}.telemetry.jsonl.gz").is_file()
        if trial["cause"] == "client_limited":
            continue  # a busy machine: said so, repeated on a fresh start, and scored by nobody
        assert trial["state"] == "completed", trial["message"]
        assert trial["median"]["ttft_ms"]["p50"] > 0
        assert trial["median"]["prefix_hit_rate"] > 0.5
        assert trial["median"]["memory"]["source"] == "simulated"
    assert {t["role"] for t in found if t["state"] == "completed"} == {"baseline", "candidate", "final"}


def test_the_baseline_and_the_best_are_measured_again_on_fresh_starts(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    finals = [t for t in trials(swept[0] / "results/tiny") if t["role"] == "final" and t["state"] == "completed"]
    order = [t["final_of"] for t in finals]
    half = len(order) // 2
    assert order[:half] == list(reversed(order[half:])), "the second half runs in reverse order"
    assert 0 in order, "the baseline is among them"


def test_the_same_command_finds_it_done(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = swept[0]
    before = {f: f.read_bytes() for f in folder.glob("results/tiny/trials/*/trial.json")}
    again = run("sweep", "tiny.yaml", "--engine", "sim", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert {f: f.read_bytes() for f in folder.glob("results/tiny/trials/*/trial.json")} == before
    assert "SIMULATED" in again.stdout


def test_another_workload_is_not_mixed_in(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = swept[0]
    refused = run("sweep", "tiny.yaml", "--engine", "sim", "--set", "workload.requests=25", cwd=folder)
    assert refused.returncode == 2
    assert "workload.requests" in refused.stderr
    assert "--fresh" in refused.stderr


def test_freeze_refuses_a_simulated_winner_unless_allowed(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder = swept[0]
    refused = run("freeze", cwd=folder)
    assert refused.returncode == 2
    assert "--allow-simulated" in refused.stderr
    allowed = run("freeze", "--allow-simulated", cwd=folder)
    assert allowed.returncode == 0, allowed.stderr
    frozen = json.loads(allowed.stdout)
    assert frozen["schema"] == "chunktune.frozen/1"
    assert frozen["simulated"] is True
    assert frozen["baseline"]["starts"] == 2
    assert not {"host", "port", "served_model_name"} & set(frozen["engine_args"])


def test_dry_run_prints_and_launches_nothing(tmp_path: Path, profile: Path) -> None:
    done = run("sweep", profile, "--engine", "sim", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    assert any("--max-num-batched-tokens 64" in line for line in lines)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_in_mid_trial_keeps_what_is_finished(tmp_path: Path, profile: Path, number: signal.Signals) -> None:
    study = tmp_path / "results/tiny"
    arguments = command("sweep", profile, "--engine", "sim", "--set", "workload.requests=200")
    with subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            wait_until(lambda: candidate_under_way(study))
            child.send_signal(number)
            _, stderr = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130, stderr.decode()
    assert b"Traceback" not in stderr
    assert engines_below(tmp_path) == []
    found = scored(study)
    assert [t["state"] for t in found] == ["completed", "interrupted"]
    assert len(found[1]["rounds"]) >= 1
    summary = json.loads((study / "summary.json").read_text())
    assert summary["best"] is None

    again = run("sweep", profile, "--engine", "sim", "--set", "workload.requests=200", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    roles = [(t["role"], t["state"]) for t in scored(study)]
    assert roles.count(("baseline", "completed")) == 1
    assert roles.count(("candidate", "completed")) == 2


def test_a_killed_sweep_loses_one_trial_at_most(tmp_path: Path, profile: Path) -> None:
    study = tmp_path / "results/tiny"
    arguments = command("sweep", profile, "--engine", "sim", "--set", "workload.requests=200")
    with subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        try:
            wait_until(lambda: candidate_under_way(study))
        finally:
            child.kill()
            child.wait()
    # A lock that a kill can leave behind must not cost the half minute that Optuna would wait for it.
    Path(f"{study}/journal.log.lock").unlink(missing_ok=True)
    Path(f"{study}/journal.log.lock").symlink_to(study / "journal.log")

    again = run("sweep", profile, "--engine", "sim", "--set", "workload.requests=200", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert engines_below(tmp_path) == []
    found = scored(study)
    assert [t["state"] for t in found].count("interrupted") == 1
    assert sum(t["role"] == "baseline" for t in found) == 1
    states = [json.loads(line) for line in (study / "journal.log").read_text().splitlines()]
    assert states, "the journal is whole"


def test_no_candidate_within_the_limits_is_no_verdict(tmp_path: Path, profile: Path) -> None:
    done = run("sweep", profile, "--engine", "sim", "--set", "constraints=[ttft_ms.p99 <= 0.5]", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "ttft_ms.p99 <= 0.5" in done.stderr
    assert not (tmp_path / "results/tiny/frozen.json").exists()
    assert (tmp_path / "results/tiny/summary.json").exists()


BAD_INPUT = {
    "no such profile": (["sweep", "nonesuch", "--engine", "sim"], "nonesuch"),
    "unknown key": (["sweep", "{profile}", "--engine", "sim", "--set", "enginee=1"], "did you mean 'engine'"),
    "unaligned chunk": (["sweep", "{profile}", "--engine", "sim", "--set", "space.max_num_batched_tokens=[100]"], "96"),
    "impossible pair": (
        ["sweep", "{profile}", "--engine", "sim", "--set", "engine.args.max_num_batched_tokens=8"],
        "max_num_seqs",
    ),
    "unknown option": (["sweep", "{profile}", "--engine", "sim", "--set", "space.max_num_batched_token=[64]"], "token"),
    "missing vllm": (["sweep", "{profile}", "--vllm", "/nonexistent/vllm"], "/nonexistent/vllm"),
    "both engines": (["sweep", "{profile}", "--engine", "sim", "--vllm", "vllm"], "exclude"),
    "bad duration": (["sweep", "{profile}", "--engine", "sim", "--budget", "20"], "unit"),
    "bad study name": (["sweep", "{profile}", "--engine", "sim", "--study", "../x"], "folder"),
    "unwritable results": (["sweep", "{profile}", "--engine", "sim", "--out", "/proc/none"], "--out"),
    "unknown command": (["sweeep"], "sweep"),
    "unknown flag": (["sweep", "--nonesuch"], "--nonesuch"),
    "no study": (["freeze", "{folder}"], "study.json"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_message(tmp_path: Path, profile: Path, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    filled = [a.format(profile=profile, folder=tmp_path) for a in arguments]
    done = run(*filled, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("wrong", ["hardware.gpu=h999", "hardware.cost_model=nobody/knows-this"])
def test_hardware_that_nobody_measured_is_named(tmp_path: Path, profile: Path, wrong: str) -> None:
    done = run("sweep", profile, "--engine", "sim", "--set", wrong, cwd=tmp_path)
    assert done.returncode == 2
    assert wrong.partition("=")[2] in done.stderr
    assert "Set hardware.cost_model" in done.stderr
    assert len(trials(tmp_path / "results/tiny")) == 1
