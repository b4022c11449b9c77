"""A sweep whose memory comes through NVML, on a driver and an engine of our own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

FAKE_VLLM = Path(__file__).parents[2] / "fakes" / "fake_vllm.py"
GPU = "GPU-11111111-2222-3333-4444-555555555555"
TOTAL, USED = 80 << 30, 72 << 30
PROFILE = """\
version: 1
name: with-nvml
model: some/model
engine:
  args: {max_model_len: 4096, max_num_seqs: 16, enable_prefix_caching: true}
  startup_timeout: 1m
workload: {kind: shared-prefix, system_prompt_tokens: 64, user_prompt_tokens: [16, 48], output_tokens: [4, 8],
  concurrency: 4, requests: 16}
rounds: 1
space: {max_num_batched_tokens: [64, 256]}
"""


def test_a_sweep_shows_device_memory_and_that_it_does_not_tell_chunks_apart(
    drivers: Callable[..., Path], tmp_path: Path
) -> None:
    script, profile = tmp_path / "script", tmp_path / "profile.yaml"
    script.write_text(f"driver 570.86.15\ndevice {GPU} {TOTAL} NVIDIA H100\nused {GPU} {USED}\nbusy {GPU} 87\n")
    profile.write_text(PROFILE)
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environment |= {"LD_LIBRARY_PATH": str(drivers()), "CHUNKTUNE_FAKE_NVML": str(script)}
    done = subprocess.run(
        [sys.executable, "-m", "tuner", "sweep", profile, "--vllm", FAKE_VLLM, "--out", tmp_path / "results", "--json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trials = [json.loads(p.read_text()) for p in (tmp_path / "results").glob("*/trials/*/trial.json")]
    assert len(trials) >= 3
    for trial in trials:
        memory = trial["median"]["memory"]
        assert (memory["source"], memory["reason"]) == ("nvml", None)
        assert memory["peak_bytes"] == {GPU: USED}
        assert memory["peak_fraction"] == USED / TOTAL
        assert trial["median"]["gpu_utilization"] == {GPU: 0.87}
    summary = json.loads(done.stdout)
    assert any("not discriminating" in sentence for sentence in summary["advice"])
