"""The nightly loop on the real `vllm serve` with a GPU's timing: the same is ok, half as slow again has regressed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.frozen import frozen_of
from tuner.domain.workload import SharedPrefixWorkload, workload_sha256

ROOT = Path(__file__).resolve().parents[2]
MODEL = "meta-llama/Llama-3.1-70B-Instruct"
WORKLOAD = SharedPrefixWorkload(
    system_prompt_tokens=(1024, 1024),
    user_prompt_tokens=(32, 128),
    output_tokens=(8, 16),
    concurrency=4,
    requests=40,
)


def regress(folder: Path, vllm: str, scale: float, *words: str) -> subprocess.CompletedProcess[str]:
    paced = [sys.executable, str(ROOT / "benchmarks" / "paced" / "serve.py"), "--vllm", vllm]
    paced += ["--cost-model", "meta-llama/Meta-Llama-3.1-70B", "--count", "4", "--step-time-scale", str(scale)]
    return subprocess.run(
        [sys.executable, "-m", "tuner", "regress", *words, "--vllm", shlex.join(paced), "--stages", "1"],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.fixture(scope="module")
def frozen(vllm_command: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frozen file whose baseline the paced engine gave."""
    folder = tmp_path_factory.mktemp("paced")
    document = frozen_of(start={"effective_args": {}, "command": []}).to_json()
    document |= {
        "model": MODEL,
        "engine_args": {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 4096, "block_size": 32},
        "engine_env": {},
        "startup_timeout_s": 600.0,
        "workload": WORKLOAD.to_json(),
        "workload_sha256": workload_sha256(WORKLOAD),
        "constraints": [],
    }
    document["fingerprint"] |= {"model": MODEL, "vllm_version": None}
    (folder / "start.json").write_text(json.dumps(document))
    done = regress(folder, vllm_command, 1.0, "start.json", "--rebase", "base.json", "--starts", "2", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "base.json"


def test_the_same_engine_is_ok(frozen: Path, vllm_command: str, tmp_path: Path) -> None:
    done = regress(tmp_path, vllm_command, 1.0, str(frozen), "--starts", "2", "--tolerance", "20")
    assert done.returncode == 0, done.stdout + done.stderr


def test_half_as_slow_again_has_regressed(frozen: Path, vllm_command: str, tmp_path: Path) -> None:
    done = regress(tmp_path, vllm_command, 1.5, str(frozen), "--starts", "2", "--tolerance", "15")
    assert done.returncode == 10, done.stdout + done.stderr
    assert "regressed" in done.stdout
