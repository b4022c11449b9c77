"""Seeing the engine at work: memory by a sampling thread, counters from `/metrics`."""

from tuner.telemetry.choose import memory_source
from tuner.telemetry.families import Snapshot, Unknown, cache_info
from tuner.telemetry.host import HostSource
from tuner.telemetry.metrics import MetricsSpan, metrics_span, scrape
from tuner.telemetry.nvml import DeviceFact, DeviceFacts, NvmlSource, Tenant, describe_devices
from tuner.telemetry.sampler import Sampler
from tuner.telemetry.simulated import SimulatedSource
from tuner.telemetry.source import MemorySource, SourceError, Unavailable

__all__ = [
    "DeviceFact",
    "DeviceFacts",
    "HostSource",
    "MemorySource",
    "MetricsSpan",
    "NvmlSource",
    "Sampler",
    "SimulatedSource",
    "Snapshot",
    "SourceError",
    "Tenant",
    "Unavailable",
    "Unknown",
    "cache_info",
    "describe_devices",
    "memory_source",
    "metrics_span",
    "scrape",
]
