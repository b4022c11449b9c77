"""Device memory through NVML, as `nvidia-smi` sees it, by nvidia-ml-py (module `pynvml`).

Devices are named by UUID: indices change with CUDA_VISIBLE_DEVICES and between boots. Nothing is ever
signalled by a pid from NVML: in a container they are the host's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.domain.observation import MemorySample
from tuner.telemetry.source import SourceError, SourceName, Tree


def load_pynvml() -> Any:
    """The module, with the deprecation warning of its namesake distribution kept quiet; SourceError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("pynvml")
    except Exception as error:  # the old distribution `pynvml` can shadow it, and break in many ways
        raise SourceError(f"the module pynvml of nvidia-ml-py cannot be imported: {error}") from None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, in its own terms (indices or UUIDs); None when it is not set."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [part.strip() for part in value.split(",")]
    # CUDA itself stops at the first name that it cannot use; "-1" is the usual way to hide all.
    until = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:until]


class NvmlSource:
    """Used bytes, utilization and, where NVML tells processes apart, the engine's own bytes."""

    name: SourceName = "nvml"

    def __init__(
        self,
        device_uuids: Sequence[str] | None = None,
        pids: Callable[[], list[int]] | None = None,
        environment: Mapping[str, str] | None = None,
        count: int | None = None,
    ) -> None:
        """Devices by UUID; without them those of CUDA_VISIBLE_DEVICES, without that all.

        Of these the first `count`, which are the ones that an engine of so many ranks takes. `pids` gives the
        engine's process tree.
        """
        self.reason = ""
        self._count = count
        self._asked = device_uuids
        self._tree = Tree(pids) if pids is not None else None
        self._environment = os.environ if environment is None else environment
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._totals: dict[str, int] = {}
        self._missing: dict[str, str] = {}

    def open(self) -> None:
        if self._nvml is not None:
            return
        nvml = load_pynvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SourceError(f"NVML: {error}") from None
        try:
            self._handles = dict(self._find(nvml))
            self._totals = {uuid: int(_memory(nvml, h).total) for uuid, h in self._handles.items()}
        except nvml.NVMLError as error:
            _shut(nvml)
            raise SourceError(f"NVML: {error}") from None
        if not self._handles:
            _shut(nvml)
            raise SourceError("NVML sees no device")
        self._nvml = nvml

    def _find(self, nvml: Any) -> list[tuple[str, Any]]:
        asked = self._asked if self._asked is not None else visible_devices(self._environment)
        names = [str(i) for i in range(nvml.nvmlDeviceGetCount())] if asked is None else asked
        handles = []
        for name in names[: self._count]:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else _by_uuid(nvml, name)
            handles.append((_text(nvml.nvmlDeviceGetUUID(handle)), handle))
        return handles

    def sample(self, at_s: float) -> list[MemorySample]:
        nvml = self._nvml
        if nvml is None:
            return []
        mine = set(self._tree.at(at_s)) if self._tree is not None else set()
        samples = []
        for uuid, handle in self._handles.items():
            used = self._ask("memory", uuid, lambda h: _memory(nvml, h), handle)
            if used is None:
                continue
            share = self._ask("utilization", uuid, nvml.nvmlDeviceGetUtilizationRates, handle)
            running = self._ask("processes", uuid, nvml.nvmlDeviceGetComputeRunningProcesses, handle) if mine else []
            busy = None if share is None else share.gpu / 100
            samples.append(MemorySample(at_s, uuid, int(used.used), busy, _bytes_of(running or [], mine)))
        return samples

    def _ask(self, what: str, uuid: str, question: Callable[[Any], Any], handle: Any) -> Any:
        """An answer, or None with the reason kept; one device's refusal never stops the others."""
        try:
            return question(handle)
        except self._nvml.NVMLError as error:
            self._missing.setdefault(f"{what} of {uuid}", str(error))
            self.reason = "; ".join(f"no {name}: {why}" for name, why in self._missing.items())
            return None

    def total_bytes(self) -> Mapping[str, int]:
        return dict(self._totals)

    def close(self) -> None:
        if self._nvml is not None:
            _shut(self._nvml)
            self._nvml = None


def _memory(nvml: Any, handle: Any) -> Any:
    """Total and used bytes. The first version of the call counts what the driver reserves as used."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported, nvml.NVMLError_ArgumentVersionMismatch):
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _by_uuid(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        raise SourceError(f"NVML: device {uuid}: {error}") from None


def _bytes_of(running: Sequence[Any], pids: set[int]) -> int | None:
    """Bytes of the processes that are ours; None when NVML shows none of them (another pid namespace)."""
    used = [p.usedGpuMemory for p in running if p.pid in pids and p.usedGpuMemory is not None]
    return int(sum(used)) if used else None


def _shut(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


@dataclass(frozen=True)
class Tenant:
    """A process that uses a device; its pid is the host's."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class DeviceFact:
    """One device as it is now."""

    name: str
    uuid: str
    memory_bytes: int
    used_bytes: int
    tenants: list[Tenant] = field(default_factory=list)


@dataclass(frozen=True)
class DeviceFacts:
    """What NVML says of this machine; without devices, `reason` says why."""

    devices: list[DeviceFact] = field(default_factory=list)
    driver_version: str | None = None
    reason: str = ""
    driver_cuda: int | None = None
    """The newest major version of CUDA that the driver runs."""


def describe_devices(environment: Mapping[str, str] | None = None, count: int | None = None) -> DeviceFacts:
    """The devices that an engine started now would see (the first `count`), with the processes that use them."""
    source = NvmlSource(environment=environment, count=count)
    try:
        source.open()
    except SourceError as error:
        return DeviceFacts(reason=str(error))
    try:
        return _describe(source._nvml, source._handles)
    except source._nvml.NVMLError as error:
        return DeviceFacts(reason=f"NVML: {error}")
    finally:
        source.close()


def _describe(nvml: Any, handles: Mapping[str, Any]) -> DeviceFacts:
    devices = []
    for uuid, handle in handles.items():
        memory = _memory(nvml, handle)
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            running = []
        tenants = [Tenant(int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in running]
        name = _text(nvml.nvmlDeviceGetName(handle))
        devices.append(DeviceFact(name, uuid, int(memory.total), int(memory.used), tenants))
    try:
        driver: str | None = _text(nvml.nvmlSystemGetDriverVersion())
        cuda: int | None = int(nvml.nvmlSystemGetCudaDriverVersion_v2()) // 1000
    except nvml.NVMLError:
        driver = cuda = None
    return DeviceFacts(devices, driver, driver_cuda=cuda)
