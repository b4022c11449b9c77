"""A GPU node without GPUs: NVML's symbols for eight devices, and a `vllm` that starts on them as vLLM does."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.conftest import marked

FAKES = Path(__file__).parents[1] / "fakes"
GIB = 1 << 30
TOTAL = 80 * GIB
NEIGHBOUR = 5
"""The device on which another tenant runs."""
SCRIPT: dict[str, Any] = {
    "ttft_ms_by_chunk": {"256": 60, "512": 30, "1024": 36, "2048": 42, "4096": 48, "8192": 54},
    "ttft_ms": 54,
    "token_ms": 4,
    "kv_tokens": 448_384,
}


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 of our own."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to build the library with NVML's symbols")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-std=c11", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", FAKES / "nvml" / "fake_nvml.c"]
    subprocess.run([compiler, *flags], check=True, timeout=60)
    return folder


def uuid_of(index: int) -> str:
    return f"GPU-{index:08d}"


class GpuNode:
    """Runs chunktune there."""

    def __init__(self, folder: Path, driver: Path) -> None:
        self.folder = folder
        self._driver = driver
        self._nvml = folder / "nvml"
        self.devices(8)

    def devices(self, count: int, held: dict[int, int] | None = None) -> None:
        """So many devices, and what other tenants hold of them, in bytes."""
        lines = ["driver 575.57.08"]
        for index in range(count):
            lines.append(f"device {uuid_of(index)} {TOTAL} NVIDIA H100 80GB HBM3")
            lines.append(f"used {uuid_of(index)} {GIB // 2}")
        for index, size in {NEIGHBOUR: 30 * GIB, **(held or {})}.items():
            if index < count:
                lines += [f"used {uuid_of(index)} {size}", f"process {uuid_of(index)} 4711 {size}"]
        self._nvml.write_text("\n".join(lines) + "\n")

    def chunktune(
        self, *words: str, script: dict[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        fake = {**SCRIPT, **(script or {}), "node": {"nvml": str(self._nvml)}}
        added = {
            "LD_LIBRARY_PATH": str(self._driver),
            "CHUNKTUNE_FAKE_NVML": str(self._nvml),
            "CHUNKTUNE_VLLM": shlex.join([sys.executable, str(FAKES / "fake_vllm.py")]),
            "CHUNKTUNE_TEST_MARK": str(self.folder),
            "FAKE_VLLM": json.dumps(fake),
        }
        return subprocess.run(
            [sys.executable, "-m", "tuner", *words],
            cwd=self.folder,
            env={**inherited, **added, **(env or {})},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    def left(self) -> list[int]:
        """Pids of what is alive of all that was started here."""
        return marked(self.folder)


@pytest.fixture
def node(tmp_path: Path, driver: Path) -> GpuNode:
    return GpuNode(tmp_path, driver)


@pytest.fixture
def sweep(node: GpuNode) -> Callable[..., dict[str, Any]]:
    """Run a sweep that is made short, see that nothing of it is left, and return its document."""

    def run(profile: str, *changes: str, env: dict[str, str] | None = None, **script: Any) -> dict[str, Any]:
        short = ["workload.requests=48", "rounds=2", "space.refine=false", "budget.time=60s", *changes]
        words = [word for change in short for word in ("--set", change)]
        done = node.chunktune("sweep", profile, "--json", "--study", "s", *words, env=env, script=script)
        assert node.left() == []
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(done.stdout))

    return run
