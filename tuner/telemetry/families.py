"""What `/metrics` says: snapshots, and what changed between two of them. Pure.

Names are exact and in order of preference, newest first: vLLM renamed its series over time, some
releases export both names, and each has a `_created` sibling. One family is taken, the same before
and after; adding two would double.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tuner.domain.observation import CounterDelta

Labels = tuple[tuple[str, str], ...]
Series = dict[Labels, float]

PREFIXES = ("vllm:", "chunktune:")
_STARTED = "process_start_time_seconds"
_LEFT = ("vllm:num_requests_running", "vllm:num_requests_waiting")
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")

_CACHE = (
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total"),
    ("vllm:gpu_prefix_cache_queries", "vllm:gpu_prefix_cache_hits"),
)
_TTFT = (("vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count"),)
_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    "engine_steps": ("vllm:iteration_tokens_total_count",),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "requests_finished": ("vllm:request_success_total", "vllm:request_success"),
}
_CACHE_INFO = "vllm:cache_config_info"
LARGEST_BLOCK = 1 << 16
"""Tokens; far above any block of vLLM's, hybrid models included."""


@dataclass(frozen=True)
class Unknown:
    """`/metrics` could not be read; nothing is known, which is not the same as 0."""

    reason: str


@dataclass(frozen=True)
class Snapshot:
    """Series by exact sample name, of vLLM and the plug-in, and when the process started; buckets left out."""

    series: dict[str, Series]
    counters: frozenset[str] = frozenset()
    """Sample names whose type is counter."""
    not_finite: frozenset[str] = frozenset()
    """Sample names that had a value which is no number (NaN, Inf); those values are left out."""

    def total(self, name: str) -> float | None:
        """Sum over engines and other labels; None when there is no such series."""
        found = self.series.get(name)
        return None if found is None else sum(found.values())


def parse(text: str) -> Snapshot | Unknown:
    """A snapshot of Prometheus text."""
    series: dict[str, Series] = {}
    counters: set[str] = set()
    not_finite: set[str] = set()
    try:
        for family in text_string_to_metric_families("\n".join(_relevant(text)) + "\n"):
            for sample in family.samples:
                value = float(sample.value)
                if not math.isfinite(value):
                    not_finite.add(sample.name)
                    continue
                series.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = value
                if family.type == "counter":
                    counters.add(sample.name)
    except (ValueError, KeyError, IndexError) as error:
        return Unknown(f"/metrics is no Prometheus text: {error}")
    return Snapshot(series, frozenset(counters), frozenset(not_finite))


def _relevant(text: str) -> Iterable[str]:
    """Our series without histogram buckets: nine tenths of the text, which nobody asks for."""
    for line in text.split("\n"):
        if line.startswith((*PREFIXES, _STARTED)):
            if "_bucket{" not in line and "_created{" not in line and "_created " not in line:
                yield line
        elif line.startswith("# TYPE ") and line[7:].startswith(PREFIXES):
            yield line


def kv_usage(snapshot: Snapshot) -> float | None:
    """Share of the KV pool in use, 0 to 1, of the fullest engine; None when it is not said."""
    for name in KV_USAGE:
        found = snapshot.series.get(name)
        if found:
            return max(found.values())
    return None


def kv_usage_of_text(text: str) -> float | None:
    """`kv_usage` straight from the text, for polling: one line in hundreds is parsed."""
    lines = [line for line in text.split("\n") if line.startswith(KV_USAGE)]
    snapshot = parse("\n".join(lines))
    return kv_usage(snapshot) if isinstance(snapshot, Snapshot) else None


def requests_left(snapshot: Snapshot) -> float | None:
    """Requests that run or wait at this moment; None when it is not said."""
    found = [total for name in _LEFT if (total := snapshot.total(name)) is not None]
    return sum(found) if found else None


def cache_info(snapshot: Snapshot) -> tuple[int | None, int | None]:
    """(KV pool in tokens over all engines, block size), as the engine says; None where it does not.

    Blocks times block size would be no pool: blocks of a hybrid model's groups differ in size.
    """
    infos = [dict(labels) for labels in snapshot.series.get(_CACHE_INFO, {})]
    tokens = [size for info in infos if (size := _whole(info.get("kv_cache_size_tokens"))) is not None]
    blocks = [size for info in infos if (size := _whole(info.get("block_size"))) and size <= LARGEST_BLOCK]
    return (sum(tokens) if tokens else None, blocks[-1] if blocks else None)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else None


@dataclass
class _Delta:
    before: Snapshot
    after: Snapshot
    reasons: dict[str, str] = field(default_factory=dict)

    def change(self, name: str) -> float | str | None:
        """How far a counter went; a sentence when it went back; None when it is not there.

        A series may appear in between (its label was never seen before): it began at 0. Each series
        is looked at alone, so that one engine's restart does not hide behind another's progress.
        """
        if name in self.before.not_finite | self.after.not_finite:
            return f"{name} is not finite"
        last = self.after.series.get(name)
        first = self.before.series.get(name, {})
        if last is None:
            return f"{name} vanished between two looks" if first else None
        if any(labels not in last or last[labels] < value for labels, value in first.items()):
            return f"{name} went back: the server was started again in between"
        return sum(value - first.get(labels, 0.0) for labels, value in last.items())

    def counter(self, field_name: str, names: Iterable[str]) -> float | None:
        for name in names:
            found = self.change(name)
            if isinstance(found, str):
                self.reasons[field_name] = found
                return None
            if found is not None:
                return found
        self.reasons[field_name] = f"/metrics has no {' or '.join(names)}"
        return None

    def pair(self, field_name: str, families: Iterable[tuple[str, str]]) -> tuple[float, float] | None:
        """Both halves of the first family that is whole."""
        for names in families:
            first, second = (self.change(name) for name in names)
            if isinstance(first, str) or isinstance(second, str):
                self.reasons[field_name] = first if isinstance(first, str) else str(second)
                return None
            if first is not None and second is not None:
                return first, second
        self.reasons[field_name] = f"/metrics has neither {' nor '.join(names[0] for names in families)}"
        return None


def delta(before: Snapshot | Unknown, after: Snapshot | Unknown, usages: Iterable[float | None] = ()) -> CounterDelta:
    """What happened between two looks; `usages` are the polls of `kv_usage` in between."""
    if isinstance(before, Unknown):
        return _nothing(before, before, after, usages)
    if isinstance(after, Unknown):
        return _nothing(after, before, after, usages)
    started = [snapshot.total(_STARTED) for snapshot in (before, after)]
    if None not in started and started[0] != started[1]:
        other = "another server answered /metrics than before, or it was started again: its counters do not connect"
        return _nothing(Unknown(other), before, after, usages)
    span = _Delta(before, after)
    found = CounterDelta(reasons=span.reasons)
    cache = span.pair("prefix_hit_rate", _CACHE)
    if cache is not None:
        found.prefix_hit_rate = _ratio(
            span, "prefix_hit_rate", cache[1], cache[0], "no prefix-cache query in this span"
        )
    found.prompt_tokens = span.counter("prompt_tokens", _COUNTERS["prompt_tokens"])
    found.engine_steps = span.counter("engine_steps", _COUNTERS["engine_steps"])
    found.preemptions = span.counter("preemptions", _COUNTERS["preemptions"])
    found.requests_finished = span.counter("requests_finished", _COUNTERS["requests_finished"])
    found.requests_left = requests_left(after)
    if found.requests_left is None:
        span.reasons["requests_left"] = f"/metrics has no {' or '.join(_LEFT)}"
    ttft = span.pair("server_ttft_mean_ms", _TTFT)
    if ttft is not None:
        mean_s = _ratio(span, "server_ttft_mean_ms", ttft[0], ttft[1], "no first token in this span")
        found.server_ttft_mean_ms = None if mean_s is None else mean_s * 1e3
    _gauges(found, before, after, usages)
    found.plugin = _plugin(span)
    return found


def _ratio(span: _Delta, name: str, top: float, bottom: float, why_none: str) -> float | None:
    if bottom == 0:
        span.reasons[name] = why_none
        return None
    return top / bottom


def _gauges(
    found: CounterDelta, before: Snapshot | Unknown, after: Snapshot | Unknown, usages: Iterable[float | None]
) -> None:
    known = [s for s in (before, after) if isinstance(s, Snapshot)]
    inside = [u for u in usages if u is not None]
    # Both ends are idle moments: without a look in between their value would pass for a peak of 0.
    found.kv_cache_usage_peak = (
        max([*inside, *(u for s in known if (u := kv_usage(s)) is not None)]) if inside else None
    )
    if not inside:
        said = any(kv_usage(s) is not None for s in known)
        found.reasons["kv_cache_usage_peak"] = (
            "the span was over before the first look at the KV usage"
            if said
            else f"/metrics has no {' or '.join(KV_USAGE)}"
        )
    found.kv_cache_tokens = cache_info(known[-1])[0] if known else None
    if found.kv_cache_tokens is None:
        found.reasons["kv_cache_tokens"] = f"/metrics has no {_CACHE_INFO} with the size of the KV pool"


def _nothing(
    failed: Unknown, before: Snapshot | Unknown, after: Snapshot | Unknown, usages: Iterable[float | None]
) -> CounterDelta:
    names = ("prefix_hit_rate", *_COUNTERS, "requests_left", "server_ttft_mean_ms")
    found = CounterDelta(reasons=dict.fromkeys(names, failed.reason))
    _gauges(found, before, after, usages)
    for name in ("kv_cache_usage_peak", "kv_cache_tokens"):
        if name in found.reasons:
            found.reasons[name] = failed.reason
    return found


def _plugin(span: _Delta) -> dict[str, float]:
    """The plug-in's counters over the span, and its gauges as they stand, without prefix and `_total`."""
    found: dict[str, float] = {}
    for name in sorted(span.after.series):
        if not name.startswith("chunktune:"):
            continue
        short = name.removeprefix("chunktune:")
        counts = name in span.after.counters or short.endswith(("_total", "_sum", "_count"))
        read: Callable[[str], float | str | None] = span.change if counts else span.after.total
        value = read(name)
        if isinstance(value, str):
            span.reasons[f"plugin.{short.removesuffix('_total')}"] = value
        elif value is not None:
            found[short.removesuffix("_total")] = value
    return found
