"""The main job on a GPU node: device memory through NVML, on the real vLLM where it is installed."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.telemetry.nvml import DeviceFacts

FAKE_VLLM = Path(__file__).parents[1] / "fakes" / "fake_vllm.py"
PROFILE = """\
version: 1
name: gpu-tiny
model: chunktune/tiny
engine:
  args: {{load_format: dummy, max_model_len: 2048, max_num_seqs: 32, gpu_memory_utilization: 0.30,
    enable_prefix_caching: true}}
  env: {{HF_HUB_OFFLINE: "1"}}
  startup_timeout: 10m
workload: {{kind: shared-prefix, system_prompt_tokens: 512, user_prompt_tokens: [16, 48], output_tokens: [4, 8],
  concurrency: 8, requests: {requests}}}
rounds: {rounds}
space: {{max_num_batched_tokens: [128, 512]}}
constraints: [failed_requests == 0]
"""


def sweep(tmp_path: Path, vllm: str, *, requests: int, rounds: int) -> list[dict]:
    profile = tmp_path / "profile.yaml"
    profile.write_text(PROFILE.format(requests=requests, rounds=rounds))
    done = subprocess.run(
        [sys.executable, "-m", "tuner", "sweep", profile, "--vllm", vllm, "--out", tmp_path / "results", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["simulated"] is False
    trials = [json.loads(p.read_text()) for p in sorted((tmp_path / "results").glob("*/trials/*/trial.json"))]
    return [t for t in trials if t["state"] == "completed"]


def check(trials: list[dict], devices: DeviceFacts) -> None:
    known = {d.uuid: d.memory_bytes for d in devices.devices}
    assert len(trials) >= 3
    for trial in trials:
        memory = trial["median"]["memory"]
        assert memory["source"] == "nvml"
        assert set(memory["peak_bytes"]) <= set(known)
        for device, peak in memory["peak_bytes"].items():
            assert 0 < peak <= known[device]
        assert 0 < memory["peak_fraction"] <= 1


def test_a_sweep_with_nvml_on_an_engine_that_uses_no_device(tmp_path: Path, devices: DeviceFacts) -> None:
    vllm = shlex.join([sys.executable, str(FAKE_VLLM)])
    check(sweep(tmp_path, vllm, requests=20, rounds=1), devices)


def test_a_sweep_of_the_real_vllm(tmp_path: Path, devices: DeviceFacts) -> None:
    vllm = os.environ.get("CHUNKTUNE_TEST_VLLM") or shutil.which("vllm")
    if vllm is None:
        pytest.skip("no `vllm` command here; point CHUNKTUNE_TEST_VLLM at one")
    trials = sweep(tmp_path, vllm, requests=40, rounds=3)
    check(trials, devices)
    for trial in trials:
        memory = trial["median"]["memory"]
        largest = max(memory["peak_bytes"].values())
        assert largest >= 0.25 * max(d.memory_bytes for d in devices.devices), "vLLM preallocates its pool"
        assert memory["breakdown"]["kv_pool_bytes"]
        assert trial["median"]["prefix_hit_rate"] > 0.5
        assert trial["median"]["engine_steps"] > 0
