"""Which engine a command runs on: the `vllm` that is there unless it is a CPU build, else the simulated one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tuner.domain.profile import Hardware, is_secret_name
from tuner.engine.installed import is_cpu_build
from tuner.errors import UsageError
from tuner.telemetry import describe_devices

_DAEMONS = frozenset({"docker", "podman", "nerdctl", "kubectl", "srun"})
"""Launchers whose server is no child of theirs, so that ending them does not end it."""

EngineOption = Literal["auto", "vllm", "sim"]


@dataclass(frozen=True)
class EngineChoice:
    """What to launch, and why that. `env` goes to the engine beside the profile's own."""

    kind: Literal["vllm", "sim"]
    launcher: tuple[str, ...]
    reason: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        return self.kind == "sim"

    @property
    def sentence(self) -> str:
        """The first line that a command says."""
        what = "SIMULATED engine" if self.simulated else f"engine: {shlex.join(self.launcher)}"
        return f"{what} ({self.reason})"


def choose_engine(option: EngineOption, vllm_command: str | None, hardware: Hardware, model: str) -> EngineChoice:
    """UsageError when vLLM is asked for and its command is not there."""
    if vllm_command:
        if option == "sim":
            raise UsageError("--engine sim and a vLLM command exclude each other", "Drop --vllm and CHUNKTUNE_VLLM.")
        return EngineChoice("vllm", _command(vllm_command), "a vLLM command was given")
    if option == "sim":
        return _simulated(hardware, model, "asked for with --engine sim")
    found = shutil.which("vllm")
    if option == "vllm":
        if found is None:
            raise UsageError(
                "no `vllm` command on this machine",
                "Install vLLM (pip install vllm), point --vllm or CHUNKTUNE_VLLM at it, or take --engine sim.",
            )
        return EngineChoice("vllm", (found,), "asked for with --engine vllm")
    if found is None:
        return _simulated(hardware, model, "no `vllm` command here")
    devices = describe_devices()
    if not devices.devices and is_cpu_build((found,)):
        return _simulated(hardware, model, "the vllm here is a CPU build")
    if not devices.devices:
        # ROCm, GB10, a container without NVML: vLLM may run there although its GPUs cannot be read.
        return EngineChoice("vllm", (found,), f"its GPUs cannot be read, so memory is not measured: {devices.reason}")
    return EngineChoice("vllm", (found,), f"found with {len(devices.devices)} x {devices.devices[0].name}")


def _command(text: str) -> tuple[str, ...]:
    try:
        parts = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"the vLLM command {text!r} cannot be read: {error}") from None
    if not parts:
        raise UsageError("the vLLM command is empty")
    secret = next((p.partition("=")[0] for p in parts if "=" in p and is_secret_name(p.partition("=")[0])), None)
    if secret is not None:
        raise UsageError(
            f"the vLLM command sets {secret}: a secret does not belong on a command line",
            "Export it: the engine inherits chunktune's environment.",
        )
    if os.path.basename(parts[0]) in _DAEMONS:
        raise UsageError(
            f"the vLLM command starts {parts[0]}: the server would belong to a daemon and outlive its stop",
            "Run chunktune inside the container or the job instead (docs/containers.md).",
        )
    if shutil.which(parts[0]) is None:
        raise UsageError(
            f"the vLLM command {parts[0]!r} does not exist or is not executable", "Check --vllm or CHUNKTUNE_VLLM."
        )
    # Relative paths would break: engines are started from their own folder.
    return tuple(os.path.abspath(p) if os.sep in p and Path(p).exists() else p for p in parts)


def _simulated(hardware: Hardware, model: str, reason: str) -> EngineChoice:
    settings = {"gpu": hardware.gpu, "count": hardware.count, "cost_model": hardware.cost_model or model}
    given = os.environ.get("CHUNKTUNE_SIM")
    if given:
        settings |= json.loads(given)
    env = {"CHUNKTUNE_SIM": json.dumps(settings)}
    return EngineChoice("sim", (sys.executable, "-m", "tuner.sim"), reason, env)
