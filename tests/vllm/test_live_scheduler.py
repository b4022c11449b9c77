"""vLLM's scheduler under live control: the contract, and the same steps as schedulers that were started anew."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = 70


def run(vllm_command: str, script: str, *arguments: str) -> dict[str, Any]:
    """What a script of this folder prints in vLLM's Python."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(Path(vllm_command).with_name("python")), str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["async", "sync", "window"])
def test_no_step_differs_from_a_fresh_scheduler_s(vllm_command: str, float32_model: str, kind: str) -> None:
    found = run(vllm_command, "live_side_by_side.py", float32_model, kind, str(SETTINGS))
    assert found["differs"] == ""
    assert found["settings"] == SETTINGS
    assert found["steps"] > 5000
    assert found["preemptions"] > 50
    # A model with two kinds of KV cache cannot have a budget.
    assert (found["policies"] > 20) == (kind != "window")


def test_it_is_switched_as_the_contract_says(vllm_command: str, float32_model: str) -> None:
    found = run(vllm_command, "live_contract.py", float32_model)
    assert len(found) > 30
    assert {name: wrong for name, wrong in found.items() if wrong is not None} == {}
