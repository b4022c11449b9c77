"""The real `vllm serve` on the CPU: CHUNKTUNE_TEST_VLLM names the command, else the project's .venv-vllm has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.domain.setting import ReuseBudget
from tuner.engine.launch import LaunchSpec
from tuner.sim.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm_command() -> str:
    """The `vllm` command under test."""
    found = ROOT / ".venv-vllm" / "bin" / "vllm"
    command = os.environ.get("CHUNKTUNE_TEST_VLLM") or (str(found) if found.exists() else "")
    if not command:
        pytest.skip("CHUNKTUNE_TEST_VLLM names no vllm command, and there is no .venv-vllm")
    return command


@pytest.fixture(scope="session")
def float32_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose arithmetic is as repeatable as can be."""
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), dtype="float32"))


@pytest.fixture(scope="session")
def launch_spec(
    vllm_command: str, float32_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., LaunchSpec]:
    """Makes the spec of an engine: `launch_spec(budget, **vllm_options)`."""

    def make(budget: ReuseBudget | None = None, **options: Any) -> LaunchSpec:
        folder = tmp_path_factory.mktemp("engine")
        args = {
            "load_format": "dummy",
            "dtype": "float32",
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": 1024,
        }
        return LaunchSpec(
            launcher=(vllm_command,),
            kind="vllm",
            model=float32_model,
            args={**args, **options},
            env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            log_path=folder / "engine.log",
            startup_timeout_s=400,
            record_dir=folder / "records",
            reuse_budget=budget,
        )

    return make
