"""The main job through the command itself, on the simulated engine."""

from __future__ import annotations

import json
import os
import re
import shutil
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
    return any(t["role"] == "candidate" and t["state"] == "interrupted" and t["rounds"] for t in trials(study))


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


def counts(stderr: str) -> list[tuple[int, int]]:
    """The `[n/m]` of each finished trial."""
    lines = re.findall(r"^\[(\d+)/(\d+)\] (?!.*: started$)", stderr, re.MULTILINE)
    return [(int(n), int(m)) for n, m in lines]


def assert_time_adds_up(study: Path) -> None:
    """Every second of the study is in one of its parts, and each part is the sum over its trials."""
    time_of, found = json.loads((study / "summary.json").read_text())["time"], [t["time"] for t in trials(study)]
    parts = [time_of["engine_start_s"], time_of["load_s"], time_of["overhead_s"]]
    assert min(parts) >= 0
    assert time_of["total_s"] == pytest.approx(sum(parts))
    assert time_of["total_s"] >= sum(t["total_s"] for t in found) - 1e-6
    assert time_of["load_s"] == pytest.approx(sum(t["load_s"] for t in found))
    assert time_of["engine_start_s"] == pytest.approx(sum(t["engine_start_s"] + t["stop_s"] for t in found))
    for trial in found:
        assert trial["total_s"] >= trial["engine_start_s"] + trial["load_s"] + trial["stop_s"] - 1e-6


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
    assert summary["time"]["load_s"] > 0
    assert_time_adds_up(study)
    numbers = counts(done.stderr)
    assert [n for n, _ in numbers] == list(range(1, len(numbers) + 1))
    assert numbers[-1] == (len(numbers), len(numbers)), "the last trial is the last one of the count"
    repeated = len(trials(study)) - len(scored(study))
    assert f"study: {len(numbers) - repeated} trials\n" in done.stderr


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
    study = folder / "results/tiny"

    def files() -> dict[Path, tuple[bytes, int]]:
        return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in study.rglob("*") if f.is_file()}

    before = files()
    again = run("sweep", "tiny.yaml", "--engine", "sim", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert files() == before, "nothing was measured, so nothing is written"
    assert "SIMULATED" in again.stdout
    assert f"study: {len(trials(study))} trials\n" in again.stderr
    assert again.stderr.endswith("nothing was left to measure\n")
    assert counts(again.stderr) == []


def test_the_committed_example_is_whole_and_left_as_it_is(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "results/reference"
    shutil.copytree(example, tmp_path / "reference")
    done = run("sweep", "quick", "--engine", "sim", "--study", "reference", "--out", tmp_path, "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for file in (f for f in example.rglob("*") if f.is_file() and f.name != ".lock"):
        assert (tmp_path / "reference" / file.relative_to(example)).read_bytes() == file.read_bytes(), file


def test_what_a_missing_document_said_is_written_again(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = swept[0]
    shutil.copytree(folder / "results/tiny", folder / "copies/tiny")
    (folder / "copies/tiny/summary.json").unlink()
    (folder / "copies/tiny/frozen.json").write_text("{}")
    done = run("sweep", "tiny.yaml", "--engine", "sim", "--out", "copies", "--quiet", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert_time_adds_up(folder / "copies/tiny")
    frozen = [json.loads((folder / out / "tiny/frozen.json").read_text()) for out in ("results", "copies")]
    assert [f.pop("created_at") != "" for f in frozen] == [True, True]
    assert frozen[0] == frozen[1]


def test_one_round_and_one_candidate_are_counted_as_they_are(tmp_path: Path, profile: Path) -> None:
    """Two trials, then a single start of each in the finals."""
    arguments = ["sweep", profile, "--engine", "sim", "--rounds", "1", "--set", "space.max_num_batched_tokens=[256]"]
    done = run(*arguments, "--trials", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "study: 4 trials\n" in done.stderr
    made = len(trials(tmp_path / "results/tiny"))
    assert counts(done.stderr)[-1] == (made, made)


def test_quiet_says_nothing_while_all_is_well(tmp_path: Path, profile: Path) -> None:
    arguments = ["sweep", profile, "--engine", "sim", "--quiet", "--rounds", "1"]
    done = run(*arguments, "--set", "space.max_num_batched_tokens=[256]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "256" in done.stdout
    study = tmp_path / "results/tiny"
    if len(scored(study)) == len(trials(study)):
        assert done.stderr == ""


def test_another_workload_is_not_mixed_in(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder = swept[0]
    for more in ([], ["--dry-run"]):
        arguments = ["sweep", "tiny.yaml", "--engine", "sim", "--set", "workload.requests=25", *more]
        refused = run(*arguments, cwd=folder)
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
    assert summary["counts"]["interrupted"] == 1
    assert_time_adds_up(study)

    again = run("sweep", profile, "--engine", "sim", "--set", "workload.requests=200", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    roles = [(t["role"], t["state"]) for t in scored(study)]
    assert roles.count(("baseline", "completed")) == 1
    assert roles.count(("candidate", "completed")) == 2
    assert "continuing: " in again.stderr
    assert "measured earlier" in again.stderr
    numbers = counts(again.stderr)
    earlier = len(trials(study)) - len(numbers) - 1
    assert numbers[0][0] == earlier + 1, "the count goes on"
    assert numbers[-1][0] == numbers[-1][1] == earlier + len(numbers)
    assert_time_adds_up(study)


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
    lost = next(t for t in found if t["state"] == "interrupted")
    said = f"trial {lost['number']}, {lost['label']}, was lost when the last run was killed"
    assert f"{said}; its configuration is measured again\n" in again.stderr
    assert lost["time"]["load_s"] > 0
    assert_time_adds_up(study)

    once_more = run("sweep", profile, "--engine", "sim", "--set", "workload.requests=200", cwd=tmp_path)
    assert once_more.returncode == 0, once_more.stderr
    assert "was lost" not in once_more.stderr, "it is said once"


def test_a_trial_killed_in_its_first_seconds_is_known_too(tmp_path: Path, profile: Path) -> None:
    study = tmp_path / "results/tiny"
    log = study / "trials/0000/engine.log"
    arguments = command("sweep", profile, "--engine", "sim")
    with subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        try:
            wait_until(log.exists)
        finally:
            child.kill()
            child.wait()
    assert [t["state"] for t in trials(study)] == ["interrupted"]
    again = run("sweep", profile, "--engine", "sim", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "trial 0, stock, was lost when the last run was killed" in again.stderr
    assert "[" not in again.stderr
    assert_time_adds_up(study)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_goes_away_under_a_sweep_is_said(tmp_path: Path, profile: Path, replaced: bool) -> None:
    study = tmp_path / "results/tiny"
    child = subprocess.Popen(
        command("sweep", profile, "--engine", "sim"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: (study / "trials/0000/trial.json").exists())
        shutil.move(study, tmp_path / "elsewhere")
        if replaced:
            study.write_text("a file of somebody else")
        _, err = child.communicate(timeout=DEADLINE_S)
    finally:
        child.kill()
        child.wait(10)
    assert child.returncode == 2, err
    assert "was removed or replaced while the sweep ran" in err or "Move it out of the way" in err
    assert "bug" not in err
    assert not replaced or study.read_text() == "a file of somebody else"
    assert engines_below(tmp_path) == []


def test_an_objective_that_nobody_measures_ends_after_the_baseline(tmp_path: Path, profile: Path) -> None:
    done = run("sweep", profile, "--engine", "sim", "--set", "objective={minimize: answer_ttft_ms.p90}", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "answer_ttft_ms.p90, which the profile optimizes, is not measured" in done.stderr
    assert "limit" not in done.stderr.splitlines()[-1]
    assert "No answer: answer_ttft_ms.p90" in " ".join(done.stdout.split())
    assert [t["role"] for t in trials(tmp_path / "results/tiny")] == ["baseline"]


@pytest.mark.parametrize("columns", ["0", "1", "30"])
def test_no_terminal_is_too_narrow_for_the_answer(swept: tuple[Path, Any], columns: str) -> None:
    done = run("sweep", "tiny.yaml", "--engine", "sim", cwd=swept[0], COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    assert "P90" in done.stdout
    assert "frozen configuration" in done.stdout
    assert any(line.startswith("*") for line in done.stdout.splitlines())


def test_no_candidate_within_the_limits_is_no_verdict(tmp_path: Path, profile: Path) -> None:
    done = run("sweep", profile, "--engine", "sim", "--set", "constraints=[ttft_ms.p99 <= 0.5]", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert re.search(r"outside ttft_ms\.p99 <= 0\.5 \([\d.,]+ ms\)", done.stderr)
    made = len(trials(tmp_path / "results/tiny"))
    assert counts(done.stderr)[-1] == (made, made), "without a feasible candidate there are no finals"
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
    "our option": (["sweep", "{profile}", "--engine", "sim", "--set", "space.port=[8000]"], "port"),
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


@pytest.mark.parametrize("case", [c for c in BAD_INPUT if BAD_INPUT[c][0][0] == "sweep" and "unwritable" not in c])
def test_a_dry_run_refuses_what_the_sweep_refuses(tmp_path: Path, profile: Path, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = run(*(a.format(profile=profile) for a in arguments), "--dry-run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("wrong", ["hardware.gpu=h999", "hardware.cost_model=nobody/knows-this"])
def test_hardware_that_nobody_measured_is_named(tmp_path: Path, profile: Path, wrong: str) -> None:
    done = run("sweep", profile, "--engine", "sim", "--set", wrong, cwd=tmp_path)
    assert done.returncode == 2
    assert wrong.partition("=")[2] in done.stderr
    assert "Set hardware.cost_model" in done.stderr
    assert len(trials(tmp_path / "results/tiny")) == 1
