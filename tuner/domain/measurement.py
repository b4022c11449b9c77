"""What a round, or several, amounts to: the numbers that people read and constraints name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tuner.domain.base import Document


class Latency(Document):
    """A distribution in milliseconds: nearest-rank percentiles, mean and sample size."""

    p50: float
    p90: float
    p99: float
    mean: float
    n: int


class Breakdown(Document):
    """Parts of device memory in bytes; null where the engine does not say."""

    weights_bytes: int | None = None
    activation_peak_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_in_use_peak_bytes: int | None = None


class Memory(Document):
    """Memory during the round. `host` is the resident memory of the engine's process tree."""

    source: Literal["nvml", "host", "simulated", "unavailable"]
    reason: str | None = None
    peak_bytes: dict[str, int] | None = None
    """Peak by device."""
    peak_fraction: float | None = None
    """Largest peak as a share of its device's capacity."""
    engine_peak_bytes: dict[str, int] | None = None
    """Peak of the engine's own processes by device, where the driver tells them apart."""
    breakdown: Breakdown = Breakdown()


class Client(Document):
    """Whether the client kept up; a limited round is not scored."""

    late_sends_p99_ms: float | None = None
    max_in_flight: int = 0
    limited: bool = False
    limited_reason: str | None = None


class Measurement(Document):
    """The metrics of a round, or their medians over rounds. Null is 'not measured': see `unmeasured`."""

    ttft_ms: Latency | None = None
    cold_ttft_ms: Latency | None = None
    ttft_cached_ms: Latency | None = None
    ttft_uncached_ms: Latency | None = None
    itl_ms: Latency | None = None
    tpot_ms: Latency | None = None
    e2e_ms: Latency | None = None
    answer_ttft_ms: Latency | None = None
    """To the first token of the answer, where a reasoning model thinks first."""
    request_throughput: float | None = None
    """Finished measured requests a second."""
    output_token_throughput: float | None = None
    goodput: float | None = None
    """Requests a second that met every latency limit of the profile."""
    goodput_share: float | None = None
    failed_requests: int | None = None
    answered_share: float | None = None
    """Output tokens given, as a share of those asked for; a failed request has given none."""
    requests: int | None = None
    """Measured requests sent."""
    prefix_hit_rate: float | None = None
    prefill_chunks_per_request: float | None = None
    engine_steps: float | None = None
    preemptions: float | None = None
    kv_cache_usage_peak: float | None = None
    kv_cache_tokens: int | None = None
    memory: Memory = Memory(source="unavailable", reason="not sampled")
    gpu_utilization: dict[str, float] | None = None
    """Mean, 0 to 1, by device."""
    oom_events: int | None = None
    client: Client = Client()
    groups: dict[str, Latency] = Field(default_factory=dict)
    """TTFT by class of request, for loads that have classes."""
    plugin: dict[str, float] = Field(default_factory=dict)
    """What the scheduler plug-in counted."""
    unmeasured: dict[str, str] = Field(default_factory=dict)
    """Metric name to the reason it is null."""
    derived: dict[str, str] = Field(default_factory=dict)
    """Metric name to how its value was come by, where it was not counted directly."""
    warnings: list[str] = Field(default_factory=list)


LATENCIES = ("ttft_ms", "cold_ttft_ms", "ttft_cached_ms", "ttft_uncached_ms", "itl_ms", "tpot_ms", "e2e_ms")
_LATENCY_FIELDS = (*LATENCIES, "answer_ttft_ms")
_STATISTICS = ("p50", "p90", "p99", "mean", "n")
_NOT_METRICS = {"memory", "gpu_utilization", "client", "groups", "plugin", "unmeasured", "derived", "warnings"}


def metric_names() -> list[str]:
    """Every path that an objective or a constraint may name."""
    names = [f"{latency}.{stat}" for latency in _LATENCY_FIELDS for stat in _STATISTICS]
    names += [f for f in Measurement.model_fields if f not in _NOT_METRICS and f not in _LATENCY_FIELDS]
    names += ["memory.peak_fraction", "gpu_utilization.mean", "client.late_sends_p99_ms"]
    return names


def is_group_metric(path: str) -> bool:
    """Whether the path is `groups.<class>.<statistic>`, the TTFT of one class of a mixed load."""
    parts = path.split(".")
    return len(parts) == 3 and parts[0] == "groups" and parts[1] != "" and parts[2] in _STATISTICS


def metric(measurement: Measurement, path: str) -> float | None:
    """The value at a path such as `ttft_ms.p90`; None when it was not measured.

    KeyError for a path that names nothing. `gpu_utilization.mean` is the mean over devices;
    `groups.<class>.p50` reaches the TTFT of one class.
    """
    if path == "gpu_utilization.mean":
        shares = measurement.gpu_utilization
        return sum(shares.values()) / len(shares) if shares else None
    if path.startswith("groups."):
        _, name, stat = path.split(".", 2)
        group = measurement.groups.get(name)
        return None if group is None else float(getattr(group, stat))
    if path not in metric_names():
        raise KeyError(path)
    value: Any = measurement
    for part in path.split("."):
        value = None if value is None else getattr(value, part)
    return None if value is None else float(value)


_HIGHER = {
    "request_throughput",
    "output_token_throughput",
    "goodput",
    "goodput_share",
    "answered_share",
    "prefix_hit_rate",
}


def higher_is_better(path: str) -> bool:
    """Whether a larger value of this metric is the good direction."""
    return path in _HIGHER or path.startswith("gpu_utilization") or path == "kv_cache_tokens"


Interval = tuple[float, float]
Ci95 = dict[str, Annotated[Interval, Field()]]
"""Metric path to [low, high]."""
