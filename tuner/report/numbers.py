"""Numbers as people read them, alike in the terminal and in the report. None becomes a dash, never 0."""

from __future__ import annotations

from tuner.domain.measurement import higher_is_better

DASH = "–"
_METRIC_WORDS = {
    "ttft_ms": "TTFT",
    "cold_ttft_ms": "cold-burst TTFT",
    "ttft_cached_ms": "TTFT (cached prompts)",
    "ttft_uncached_ms": "TTFT (uncached prompts)",
    "itl_ms": "ITL",
    "tpot_ms": "TPOT",
    "e2e_ms": "end-to-end time",
    "answer_ttft_ms": "time to the answer",
    "request_throughput": "request throughput",
    "output_token_throughput": "output throughput",
    "goodput": "goodput",
    "goodput_share": "goodput share",
    "failed_requests": "failed requests",
    "prefix_hit_rate": "prefix hit rate",
    "prefill_chunks_per_request": "prefill chunks per request",
    "engine_steps": "engine steps",
    "preemptions": "preemptions",
    "kv_cache_usage_peak": "peak KV cache usage",
    "kv_cache_tokens": "KV cache tokens",
    "memory.peak_fraction": "peak memory",
    "gpu_utilization.mean": "GPU utilisation",
}
_STAT_WORDS = {"p50": "P50", "p90": "P90", "p99": "P99", "mean": "mean", "n": "sample size"}
_SHARES = {"prefix_hit_rate", "goodput_share", "kv_cache_usage_peak", "memory.peak_fraction", "gpu_utilization.mean"}


def metric_title(path: str) -> str:
    """`ttft_ms.p90` as "TTFT P90"; an unknown path as itself."""
    if path in _METRIC_WORDS:
        return _METRIC_WORDS[path]
    head, _, stat = path.rpartition(".")
    if stat in _STAT_WORDS and head:
        word = _METRIC_WORDS.get(
            head, f"TTFT of {head.removeprefix('groups.')}" if head.startswith("groups.") else head
        )
        return f"{word} {_STAT_WORDS[stat]}"
    return path


def metric_unit(path: str) -> str:
    """ "ms", "req/s", "tok/s", "%" or ''."""
    if path in _SHARES:
        return "%"
    if path in ("request_throughput", "goodput"):
        return "req/s"
    if path == "output_token_throughput":
        return "tok/s"
    is_time = "_ms" in path or path.startswith("groups.")
    return "ms" if is_time and not path.endswith(".n") else ""


def metric_value(path: str, value: float | None) -> str:
    """A metric with its unit: "96 ms", "95.8 %", "21.4 req/s"."""
    if value is None:
        return DASH
    unit = metric_unit(path)
    if unit == "%":
        return percent(value)
    if unit == "ms":
        return f"{ms(value)} ms"
    return f"{short(value)} {unit}".rstrip()


def cell_value(path: str, value: float | None) -> str:
    """`metric_value` for a table whose times are in ms: "96", "95.8 %", "21.4 req/s"."""
    return metric_value(path, value).removesuffix(" ms")


def ms(value: float | None) -> str:
    """Milliseconds without the unit; a decimal below 10."""
    if value is None:
        return DASH
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Three significant figures or so, thousands separated."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """0.958 as "95.8 %"."""
    return DASH if share is None else f"{share * 100:.1f} %"


def gib(value: int | float | None) -> str:
    """Bytes as "62.4 GiB", or MiB below one."""
    if value is None:
        return DASH
    gibibytes = value / 2**30
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{value / 2**20:.0f} MiB"


def signed_percent(change: float) -> str:
    """-0.31 as "−31 %", with a real minus and an explicit plus; a decimal below 10 %."""
    size = abs(change) * 100
    digits = f"{size:.0f}" if size >= 9.95 else f"{size:.1f}"
    if float(digits) == 0:
        return "±0 %"
    return f"{'−' if change < 0 else '+'}{digits} %"


def is_better(path: str, change: float) -> bool:
    """Whether a relative change of this metric is an improvement."""
    return change > 0 if higher_is_better(path) else change < 0
