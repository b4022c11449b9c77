"""Resident memory of a process tree, where there is no device to ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psutil

from tuner.domain.observation import MemorySample
from tuner.telemetry.source import SourceName, Tree

DEVICE = "host"


class HostSource:
    """Sum of the resident set sizes of the engine's processes.

    Pages that several of them share are counted in each: an upper bound, right for comparing
    configurations of one engine.
    """

    name: SourceName = "host"

    def __init__(self, pids: Callable[[], list[int]], reason: str = "") -> None:
        """`pids` gives the whole tree; `reason` says why this is not NVML."""
        self.reason = reason
        self._tree = Tree(pids)
        self._processes: dict[int, psutil.Process] = {}

    def open(self) -> None:
        pass

    def sample(self, at_s: float) -> list[MemorySample]:
        sizes = [size for pid in self._tree.at(at_s) if (size := self._resident(pid)) is not None]
        return [MemorySample(at_s, DEVICE, sum(sizes))] if sizes else []

    def _resident(self, pid: int) -> int | None:
        """None for a process that is gone, or that took over the pid of one."""
        try:
            process = self._processes.get(pid)
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            return int(process.memory_info().rss)
        except psutil.Error:
            self._processes.pop(pid, None)
            return None

    def total_bytes(self) -> Mapping[str, int]:
        return {DEVICE: int(psutil.virtual_memory().total)}

    def close(self) -> None:
        self._processes.clear()
