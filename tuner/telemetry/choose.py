"""Which memory source this engine gets, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from tuner.telemetry.host import HostSource
from tuner.telemetry.nvml import NvmlSource
from tuner.telemetry.simulated import SimulatedSource
from tuner.telemetry.source import MemorySource, SourceError, Unavailable


def memory_source(
    kind: Literal["vllm", "sim"],
    base_url: str,
    pids: Callable[[], list[int]] | None,
    environment: Mapping[str, str] | None = None,
    count: int | None = None,
) -> MemorySource:
    """NVML where it works; else the host's memory of the tree, with the reason; sim: simulated.

    `pids` is None for a server that somebody else runs: then nothing but NVML may be looked at, and
    that only says something when the server is on this machine. `environment` is the engine's, `count` the
    number of GPUs that it takes of those that it sees.
    """
    if kind == "sim":
        return SimulatedSource(base_url)
    nvml = NvmlSource(pids=pids, environment=environment, count=count)
    try:
        nvml.open()
    except SourceError as error:
        if pids is None:
            return Unavailable(f"{error}; and the server is not ours, so its processes are not known")
        return HostSource(pids, reason=f"{error}; resident memory of the engine's processes instead")
    return nvml
