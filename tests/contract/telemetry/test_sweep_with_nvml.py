"""A sweep whose memory comes through NVML, on a driver and an engine of our own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.commands import FAKE_VLLM, rounds, run

GPU = "GPU-11111111-2222-3333-4444-555555555555"
TOTAL, USED = 80 << 30, 72 << 30
PROFILE = """\
version: 1
name: with-nvml
model: some/model
engine:
  args: {max_model_len: 4096, max_num_seqs: 16, max_num_batched_tokens: 256}
  startup_timeout: 1m
workload: {kind: shared-prefix, system_prompt_tokens: 64, user_prompt_tokens: [16, 48], output_tokens: [4, 8],
  concurrency: 4, requests: 16}
rounds: 1
space: {max_num_batched_tokens: [64], refine: false}
budget: {time: 8s}
"""


def test_a_sweep_shows_device_memory(drivers: Callable[..., Path], tmp_path: Path) -> None:
    script, profile = tmp_path / "script", tmp_path / "profile.yaml"
    script.write_text(f"driver 570.86.15\ndevice {GPU} {TOTAL} NVIDIA H100\nused {GPU} {USED}\nbusy {GPU} 87\n")
    profile.write_text(PROFILE)
    done = run(
        *("sweep", profile, "--vllm", FAKE_VLLM),
        cwd=tmp_path,
        script={"ttft_ms": 30},
        LD_LIBRARY_PATH=str(drivers()),
        CHUNKTUNE_FAKE_NVML=str(script),
        CUDA_VISIBLE_DEVICES="0",
    )
    assert done.returncode == 0, done.stderr
    measured = [row["measurement"] for row in rounds(tmp_path / "results/with-nvml")]
    assert measured
    for one in measured:
        assert (one["memory"]["source"], one["memory"]["reason"]) == ("nvml", None)
        assert one["memory"]["peak_bytes"] == {GPU: USED}
        assert one["memory"]["peak_fraction"] == USED / TOTAL
        assert one["gpu_utilization"] == {GPU: pytest.approx(0.87)}
