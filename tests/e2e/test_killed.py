"""`kill -9` of the tuner in mid-trial, then the same command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_faults import FAKE, PROFILE, STEADY, alive, read_trials


def wait_until(condition: Callable[[], bool], wait_s: float) -> bool:
    end_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_the_leftovers_are_ended_and_one_trial_at_most_is_repeated(tmp_path: Path) -> None:
    profile = tmp_path / "faults.yaml"
    profile.write_text(PROFILE)
    script = {**STEADY, "core": "stubborn", "ignore_term": True, "state": str(tmp_path / "state")}
    env = {**os.environ, "FAKE_VLLM": json.dumps(script), "CHUNKTUNE_TEST_MARK": str(tmp_path)}
    command = [sys.executable, "-m", "tuner", "sweep", str(profile), "--vllm", FAKE, "--out", str(tmp_path)]
    study = tmp_path / "faults"

    def finished() -> list[int]:
        return [t["number"] for t in read_trials(study) if t["state"] == "completed"]

    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as tuner:
        # One trial is done, the next one's engine is up and has its own process.
        log = study / "trials" / "0001" / "engine.log"
        assert wait_until(lambda: log.exists() and "startup complete" in log.read_text(), 120)
        assert len(finished()) == 1
        tuner.send_signal(signal.SIGKILL)
    orphans = alive(tmp_path)
    assert orphans, "the engine ignores SIGTERM, so it is still there"
    kept = finished()

    # Only the beginning of the second run matters here; a stubborn engine takes long to end each time.
    script |= {"core": "none", "ignore_term": False}
    env["FAKE_VLLM"] = json.dumps(script)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "a killed run had left behind" in done.stderr
    assert all(str(pid) in done.stderr for pid in orphans)
    assert alive(tmp_path) == []
    trials = read_trials(study)
    assert [t["number"] for t in trials if t["number"] in kept] == kept
    configurations = [json.dumps(t["knobs"]) for t in trials if t["role"] in ("baseline", "candidate")]
    completed = [json.dumps(t["knobs"]) for t in trials if t["role"] != "final" and t["state"] == "completed"]
    assert len(completed) == len(set(completed)) == 3
    assert len(configurations) <= 4
