"""Several rounds of one configuration: their median, their pooled tail, intervals and doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special

from tuner.domain.measurement import (
    LATENCIES,
    Breakdown,
    Ci95,
    Client,
    Interval,
    Latency,
    Measurement,
    Memory,
    metric,
    metric_names,
)
from tuner.domain.observation import RoundObservation
from tuner.measure.bootstrap import DRAWS, RoundValue, interval, median_draws, redraw, seed_of, stretch
from tuner.measure.notes import sample_warning
from tuner.measure.percentiles import latency
from tuner.measure.samples import Samples

_LATENCY_FIELDS = (*LATENCIES, "answer_ttft_ms")
_WORST = ("failed_requests", "oom_events")
_MEDIANS = (
    "request_throughput",
    "output_token_throughput",
    "goodput",
    "goodput_share",
    "answered_share",
    "requests",
    "prefix_hit_rate",
    "prefill_chunks_per_request",
    "engine_steps",
    "preemptions",
    "kv_cache_usage_peak",
    "kv_cache_tokens",
)
_WHOLE = {"requests", "kv_cache_tokens", *_WORST}
_SHARES = {
    "goodput_share",
    "answered_share",
    "prefix_hit_rate",
    "kv_cache_usage_peak",
    "memory.peak_fraction",
    "gpu_utilization.mean",
}

_NATURAL_SPREAD = 0.03
"""Relative spread between rounds that is nobody's fault (clocks, batching); doubts begin above it."""
_DOUBT = 0.001


@dataclass(frozen=True)
class Summary:
    """What several rounds of one setting amount to."""

    median: Measurement
    """Each metric's median over rounds; of failures, OOMs and memory peaks the worst round."""
    pooled: dict[str, Latency] = field(default_factory=dict)
    """Percentiles over the requests of all rounds together."""
    ci95: Ci95 = field(default_factory=dict)
    """By metric path; absent where one round without requests says nothing about spread."""
    warnings: list[str] = field(default_factory=list)


def summarize(
    rounds: Sequence[Measurement],
    observations: Sequence[RoundObservation] = (),
) -> Summary:
    """Median, pool, intervals and warnings of rounds that count.

    `observations` runs parallel to `rounds`, or is empty. ValueError for no rounds: there is no median of nothing.
    """
    if not rounds:
        raise ValueError("no rounds to summarize")
    if observations and len(observations) != len(rounds):
        raise ValueError(f"{len(rounds)} rounds, but {len(observations)} observations")
    requests = [Samples(o) for o in observations] if observations else None
    pooled = _pool(requests) if requests else {}
    warnings = _warnings(rounds, requests, pooled)
    median = median_over(rounds)
    return Summary(median.model_copy(update={"warnings": warnings}), pooled, _intervals(rounds, requests), warnings)


def _pool(requests: Sequence[Samples]) -> dict[str, Latency]:
    pooled = {}
    for name in _LATENCY_FIELDS:
        parts = [sample.values for one in requests if (sample := one.get(name)) is not None]
        found = latency(np.concatenate(parts)) if parts else None
        if found is not None:
            pooled[name] = found
    return pooled


def median_over(rounds: Sequence[Measurement]) -> Measurement:
    """Each metric's median over at least one round; of failures, OOMs and memory peaks the worst round."""
    values: dict[str, Any] = {name: _median_latency([getattr(r, name) for r in rounds]) for name in _LATENCY_FIELDS}
    for name in (*_MEDIANS, *_WORST):
        seen = [v for r in rounds if (v := getattr(r, name)) is not None]
        found = None if not seen else (max(seen) if name in _WORST else float(np.median(seen)))
        values[name] = round(found) if found is not None and name in _WHOLE else found
    groups = {name: [r.groups.get(name) for r in rounds] for r in rounds for name in r.groups}
    plugin = {name: [r.plugin[name] for r in rounds if name in r.plugin] for r in rounds for name in r.plugin}
    reasons: dict[str, str] = {}
    derived: dict[str, str] = {}
    for one in reversed(rounds):
        reasons |= one.unmeasured
        derived |= one.derived
    memory = _worst_memory([r.memory for r in rounds])
    utilization = _mean_by_device([r.gpu_utilization for r in rounds])
    known = {name for name, value in values.items() if value is not None}
    known |= {"gpu_utilization"} if utilization else set()
    known |= {"memory"} if memory.peak_bytes else set()
    return Measurement(
        **values,
        memory=memory,
        gpu_utilization=utilization,
        client=_worst_client([r.client for r in rounds]),
        groups={name: found for name, all_of in groups.items() if (found := _median_latency(all_of)) is not None},
        plugin={name: float(np.median(seen)) for name, seen in plugin.items()},
        unmeasured={name: why for name, why in reasons.items() if name not in known},
        derived={name: how for name, how in derived.items() if values.get(name) is not None},
    )


def _median_latency(found: Sequence[Latency | None]) -> Latency | None:
    seen = [one for one in found if one is not None]
    if not seen:
        return None
    middle = {stat: float(np.median([getattr(one, stat) for one in seen])) for stat in ("p50", "p90", "p99", "mean")}
    return Latency(**middle, n=int(np.median([one.n for one in seen])))


def _worst_memory(seen: Sequence[Memory]) -> Memory:
    """A peak over rounds is the largest: a limit that one round broke is broken."""
    first = next((m for m in seen if m.peak_bytes), seen[0])
    same = [m for m in seen if m.source == first.source]

    def largest(name: str) -> dict[str, int] | None:
        peaks: dict[str, int] = {}
        for one in same:
            for device, peak in (getattr(one, name) or {}).items():
                peaks[device] = max(peaks.get(device, 0), peak)
        return peaks or None

    parts = {
        name: max((v for m in seen if (v := getattr(m.breakdown, name)) is not None), default=None)
        for name in Breakdown.model_fields
    }
    return Memory(
        source=first.source,
        reason=first.reason,
        peak_bytes=largest("peak_bytes"),
        peak_fraction=max((m.peak_fraction for m in same if m.peak_fraction is not None), default=None),
        engine_peak_bytes=largest("engine_peak_bytes"),
        breakdown=Breakdown(**parts),
    )


def _mean_by_device(seen: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    devices = sorted({device for one in seen if one for device in one})
    return {d: float(np.median([one[d] for one in seen if one and d in one])) for d in devices} or None


def _worst_client(clients: Sequence[Client]) -> Client:
    late = [c.late_sends_p99_ms for c in clients if c.late_sends_p99_ms is not None]
    limited = [c.limited_reason for c in clients if c.limited]
    return Client(
        late_sends_p99_ms=max(late, default=None),
        max_in_flight=max(c.max_in_flight for c in clients),
        limited=bool(limited),
        limited_reason=limited[0] if limited else None,
    )


def _intervals(rounds: Sequence[Measurement], requests: Sequence[Samples] | None) -> Ci95:
    paths = [p for p in metric_names() if not p.endswith(".n") and p not in _WHOLE]
    paths += [
        f"groups.{name}.{stat}" for name in sorted({g for r in rounds for g in r.groups}) for stat in ("p50", "p90")
    ]
    found = {path: metric_interval(round_values(rounds, path, requests), path) for path in paths}
    return {path: bounds for path, bounds in found.items() if bounds is not None}


def round_values(
    rounds: Sequence[Measurement], path: str, requests: Sequence[Samples] | None = None
) -> list[RoundValue]:
    """The rounds that have this metric; `requests` run parallel to `rounds`."""
    latency_name, _, statistic = path.rpartition(".")
    found = []
    for index, one in enumerate(rounds):
        value = metric(one, path)
        if value is None:
            continue
        sample = requests[index].get(latency_name) if requests is not None and statistic != "n" else None
        found.append(RoundValue(value, sample))
    return found


def metric_interval(rounds: Sequence[RoundValue], path: str) -> Interval | None:
    """95 % interval of the median over rounds; None where nothing tells the spread."""
    if not rounds or (len(rounds) == 1 and rounds[0].sample is None):
        return None
    point = float(np.median([r.value for r in rounds]))
    draws = median_draws(rounds, path.rpartition(".")[2], DRAWS, seed_of(path, point))
    factor = stretch(len(rounds))
    if point > 0 and (draws > 0).all():
        low, high = interval(float(np.log(point)), np.log(draws), factor)
        low, high = min(point, float(np.exp(low))), max(point, float(np.exp(high)))
    else:
        low, high = interval(point, draws, factor)
        low = max(0.0, low) if all(r.value >= 0 for r in rounds) else low
    return (low, min(1.0, high)) if path in _SHARES else (low, high)


def _warnings(
    rounds: Sequence[Measurement], requests: Sequence[Samples] | None, pooled: dict[str, Latency]
) -> list[str]:
    notes: list[str] = []
    tails = {n: found for n, found in pooled.items() if n in ("ttft_ms", "itl_ms", "e2e_ms")}
    if pooled and (short := sample_warning(tails, " over all rounds")):
        notes.append(short)
    # The pooled sample may carry what one round's cannot, so its rounds' own remarks on size are left out.
    sized = {s for r in rounds if (s := sample_warning({n: getattr(r, n) for n in tails}))}
    for one in rounds:
        notes += [w for w in one.warnings if w not in notes and not (pooled and w in sized)]
    for name in (*_LATENCY_FIELDS, *_MEDIANS):
        having = sum(getattr(r, name) is not None for r in rounds)
        if 0 < having < len(rounds):
            notes.append(f"{name} was measured in {having} of {len(rounds)} rounds")
    if requests is not None:
        for path in ("ttft_ms.p50", "ttft_ms.p90"):
            if (doubt := disagreement(round_values(rounds, path, requests), path)) is not None:
                notes.append(doubt)
    return notes


def disagreement(rounds: Sequence[RoundValue], path: str) -> str | None:
    """A sentence when rounds differ by more than their requests' spread allows; None when they agree.

    Cochran's Q: squared distances from the weighted mean in units of each round's own error (of its
    requests redrawn, and 3 % of natural spread between rounds) against chi-square, p < 0.001.
    """
    having = [r for r in rounds if r.sample is not None and r.sample.values.size > 1 and r.value > 0]
    if len(having) < 2:
        return None
    statistic = path.rpartition(".")[2]
    rng = seed_of("disagreement", path, *(r.value for r in having))
    errors = [float(redraw(r.sample, statistic, 400, rng).std()) for r in having if r.sample is not None]
    values = np.array([r.value for r in having])
    variances = np.array(errors) ** 2 + (_NATURAL_SPREAD * float(np.median(values))) ** 2
    weights = 1 / variances
    mean = float((weights * values).sum() / weights.sum())
    surprise = float((weights * (values - mean) ** 2).sum())
    if special.chdtrc(len(having) - 1, surprise) >= _DOUBT:
        return None
    listed = ", ".join(f"{v:.0f}" if v >= 100 else f"{v:.1f}" for v in values)
    allowed = 1.96 * float(np.sqrt(variances).mean())
    return (
        f"rounds disagree in {path}: {listed}, where the spread of their requests allows about ±{allowed:.1f}; "
        "something besides the configuration changed between them"
    )
