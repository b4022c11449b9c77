"""The simulated engine plans each step exactly as vLLM's scheduler does, with and without the plug-in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tuner.sim.tiny_model import make_tiny_model

VLLM = os.environ.get("CHUNKTUNE_TEST_VLLM", "")
pytestmark = pytest.mark.skipif(not VLLM, reason="CHUNKTUNE_TEST_VLLM names no vllm command")
ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = [str(seed) for seed in range(60)] + [f"{seed}:plugin" for seed in range(60)] + ["grammar"]


def test_no_step_differs(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(Path(VLLM).with_name("python")), str(Path(__file__).with_name("side_by_side.py")), str(model)]
    done = subprocess.run([*command, *SCENARIOS], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(SCENARIOS)
    assert {name: difference for name, difference in found.items() if difference is not None} == {}
