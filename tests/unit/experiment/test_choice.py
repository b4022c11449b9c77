"""Which engine a command runs on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tuner.domain.profile import Hardware
from tuner.errors import UsageError
from tuner.experiment.choice import choose_engine
from tuner.telemetry import DeviceFacts


@pytest.mark.parametrize(
    "command",
    ["docker run --gpus all vllm/vllm-openai", "/usr/bin/podman exec x vllm", "kubectl exec pod -- vllm", "srun vllm"],
)
def test_a_launcher_whose_server_outlives_it_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match="outlive its stop") as caught:
        choose_engine("vllm", command, Hardware(), "m/x")
    assert "inside the container" in caught.value.hint


def test_a_command_that_runs_vllm_itself_is_taken() -> None:
    assert choose_engine("auto", "python -m docker_tools", Hardware(), "m/x").kind == "vllm"


@pytest.mark.parametrize(("version", "kind"), [("0.33.0", "vllm"), ("0.32.0+cpu", "sim")])
def test_a_vllm_whose_gpus_cannot_be_read_is_simulated_only_if_it_is_a_cpu_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, kind: str
) -> None:
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    info = tmp_path / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("tuner.experiment.choice.describe_devices", lambda: DeviceFacts([], reason="NVML is not there"))
    choice = choose_engine("auto", None, Hardware(), "m/x")
    assert choice.kind == kind
    if kind == "vllm":
        assert "its GPUs cannot be read, so memory is not measured: NVML is not there" in choice.sentence
