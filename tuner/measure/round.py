"""One round's observation into its measurement, with a reason for every null."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tuner.domain.measurement import Breakdown, Client, Latency, Measurement, Memory
from tuner.domain.observation import (
    CounterDelta,
    MemoryBreakdown,
    MemoryTimeline,
    RequestRecord,
    RoundObservation,
)
from tuner.domain.profile import Constraint
from tuner.measure.counted import disowned, not_ours
from tuner.measure.goodput import is_good, request_limits
from tuner.measure.notes import (
    answers_note,
    collected_note,
    deltas_warning,
    failures_note,
    no_hits_note,
    prefix_note,
    prompts_note,
    sample_warning,
)
from tuner.measure.percentiles import latency
from tuner.measure.samples import Samples, measured, reports_cache
from tuner.measure.wave import wave_warning

_WHY_NONE = {
    "ttft_ms": "no measured request received a token",
    "cold_ttft_ms": "no request of the cold burst received a token",
    "ttft_cached_ms": "no request had at least half of its prompt cached",
    "ttft_uncached_ms": "every request had at least half of its prompt cached",
    "itl_ms": "no measured request received a second token",
    "tpot_ms": "no measured request has two output tokens by its usage",
    "e2e_ms": "no measured request received a token",
    "answer_ttft_ms": "no request thought before its answer: the same as ttft_ms",
}
_COUNTED = ("prefix_hit_rate", "engine_steps", "preemptions", "kv_cache_usage_peak", "kv_cache_tokens")


def measure_round(
    observation: RoundObservation,
    counters: CounterDelta,
    memory: MemoryTimeline,
    breakdown: MemoryBreakdown,
    constraints: Sequence[Constraint],
    *,
    block_size: int | None,
    chunk_tokens: int | None = None,
    shared_prefix_tokens: int | None = None,
    kv_cache_tokens: int | None = None,
) -> Measurement:
    """The numbers of one round, also of one that does not count (`observation.discarded`).

    Counters that are not about these requests alone count for nothing. `kv_cache_tokens` is the size of the pool by
    the engine's log, for servers whose /metrics does not say.

    `chunk_tokens` is the effective max_num_batched_tokens: where the engine does not count prefill
    chunks, it gives the fewest that each prompt can have taken. `shared_prefix_tokens` (the shortest)
    lets a low hit rate be explained.
    """
    requests = measured(observation)
    others = not_ours(observation.records, counters)
    if others:
        counters = disowned(counters, others)
    unmeasured: dict[str, str] = {}
    derived: dict[str, str] = {}
    values: dict[str, Any] = {}
    groups: dict[str, Latency] = {}

    found = Samples(observation)
    for name, why in _WHY_NONE.items():
        sample = found.get(name)
        values[name] = None if sample is None else latency(sample.values)
        if values[name] is None:
            unmeasured[name] = why if sample is not None else _NO_CACHE_REPORT
    if found.collected:
        unmeasured |= dict.fromkeys(("itl_ms", "tpot_ms"), found.collected)
        if values["ttft_ms"] is not None:
            derived["ttft_ms"] = f"the time of the first piece, which holds more than one token: {found.collected}"
    for name in found.groups:
        sample = found.get(f"groups.{name}")
        if sample is not None and (group := latency(sample.values)) is not None:
            groups[name] = group

    values |= _throughput(observation, requests, constraints, found.collected, unmeasured)
    for name in _COUNTED:
        values[name] = getattr(counters, name)
        if name == "kv_cache_tokens" and values[name] is None:
            values[name] = kv_cache_tokens
        if values[name] is None:
            unmeasured[name] = counters.reasons.get(name, "the server's /metrics does not say")
    _fill_hit_rate(values, requests, unmeasured, derived)
    chunks, how = _prefill_chunks(counters, requests, chunk_tokens)
    values["prefill_chunks_per_request"] = chunks
    if how:
        (unmeasured if chunks is None else derived)["prefill_chunks_per_request"] = how

    values["memory"] = _memory(memory, breakdown, counters)
    values["gpu_utilization"] = _utilization(memory)
    if values["gpu_utilization"] is None:
        unmeasured["gpu_utilization"] = memory.reason or f"the {memory.source} source does not give utilization"
    if values["memory"].peak_bytes is None:
        unmeasured["memory"] = values["memory"].reason or "no sample"
    values["oom_events"] = sum("out of memory" in (r.error or "").lower() for r in observation.records)

    client = observation.client
    return Measurement(
        **values,
        failed_requests=sum(not r.ok for r in requests),
        answered_share=_answered(requests, unmeasured),
        requests=len(requests),
        client=Client(
            late_sends_p99_ms=client.late_sends_p99_ms,
            max_in_flight=client.max_in_flight,
            limited=client.limited,
            limited_reason=client.limited_reason or None,
        ),
        groups=groups,
        plugin=dict(counters.plugin),
        unmeasured=unmeasured,
        derived=derived,
        warnings=_warnings(observation, requests, values, others, block_size, shared_prefix_tokens),
    )


_NO_CACHE_REPORT = "the server does not report cached tokens in usage (vLLM does with --enable-prompt-tokens-details)"


def _answered(requests: Sequence[RequestRecord], unmeasured: dict[str, str]) -> float | None:
    """Output tokens given over those asked for, where the load asks for lengths and the server counts them."""
    asked = [r for r in requests if r.output_tokens_planned]
    if not asked:
        unmeasured["answered_share"] = "the load does not say how long answers are"
    elif any(r.ok and r.output_tokens is None for r in asked):
        unmeasured["answered_share"] = "the server's usage does not give output tokens"
    else:
        given = sum(r.output_tokens or 0 for r in asked if r.ok)
        return given / sum(r.output_tokens_planned or 0 for r in asked)
    return None


def _throughput(
    observation: RoundObservation,
    requests: Sequence[RequestRecord],
    constraints: Sequence[Constraint],
    collected: str,
    unmeasured: dict[str, str],
) -> dict[str, Any]:
    """Rates over the measured window: from the first measured send to the last measured end."""
    window_s = observation.measured_to_s - observation.measured_from_s
    good = [r for r in requests if r.ok]
    values: dict[str, Any] = dict.fromkeys(
        ("request_throughput", "output_token_throughput", "goodput", "goodput_share")
    )
    if window_s <= 0 or not requests:
        unmeasured |= dict.fromkeys(values, "no time was measured")
        return values
    values["request_throughput"] = len(good) / window_s
    if all(r.output_tokens is not None for r in good):
        values["output_token_throughput"] = sum(r.output_tokens or 0 for r in good) / window_s
    else:
        unmeasured["output_token_throughput"] = "the server's usage does not give output tokens"
    limits = request_limits(constraints)
    if collected and any(name in ("itl_ms", "tpot_ms") for name, _ in limits):
        unmeasured |= dict.fromkeys(("goodput", "goodput_share"), collected)
    elif limits:
        within = sum(is_good(r, limits) for r in requests)
        values["goodput"] = within / window_s
        values["goodput_share"] = within / len(requests)
    else:
        unmeasured |= dict.fromkeys(("goodput", "goodput_share"), "the profile sets no latency limit")
    return values


def _fill_hit_rate(
    values: dict[str, Any], requests: Sequence[RequestRecord], unmeasured: dict[str, str], derived: dict[str, str]
) -> None:
    """Without counters of ours the requests' own cached tokens give the rate of the measured part."""
    good = [r for r in requests if r.ok and r.prompt_tokens]
    if values["prefix_hit_rate"] is not None or not good or not reports_cache(good):
        return
    values["prefix_hit_rate"] = sum(r.cached_tokens or 0 for r in good) / sum(r.prompt_tokens or 0 for r in good)
    why = unmeasured.pop("prefix_hit_rate")
    derived["prefix_hit_rate"] = f"from the measured requests' own cached tokens: {why}"


def _prefill_chunks(
    counters: CounterDelta, requests: Sequence[RequestRecord], chunk_tokens: int | None
) -> tuple[float | None, str]:
    """Steps a prompt was spread over: (value, how or why not); '' when it was counted.

    No series of vLLM's /metrics counts them: `iteration_tokens_total` counts only steps that gave
    out a token and books a whole prompt in its last one. Counted by the scheduler plug-in or the
    simulated engine it is exact; else the least number of chunks that the uncached part of each
    prompt takes at this budget, which a prompt exceeds when it shares its steps with others.
    """
    chunks, prefills = counters.plugin.get("prefill_chunks"), counters.plugin.get("prefills")
    if chunks is not None and prefills:
        return chunks / prefills, ""
    missing = "no series of /metrics counts prefill chunks"
    good = [r for r in requests if r.ok and (r.prompt_tokens or r.prompt_tokens_planned)]
    if chunk_tokens is None or not good:
        return None, missing
    if not reports_cache(good):
        return None, f"{missing}, and {_NO_CACHE_REPORT}"
    least = []
    for record in good:
        prompt = record.prompt_tokens or record.prompt_tokens_planned or 0
        least.append(max(1, math.ceil((prompt - (record.cached_tokens or 0)) / chunk_tokens)))
    return float(np.mean(least)), f"at least: uncached prompt tokens over the chunk size, since {missing}"


def _memory(timeline: MemoryTimeline, breakdown: MemoryBreakdown, counters: CounterDelta) -> Memory:
    peaks: dict[str, int] = {}
    engine: dict[str, int] = {}
    for sample in timeline.samples:
        peaks[sample.device] = max(peaks.get(sample.device, 0), sample.used_bytes)
        if sample.engine_bytes is not None:
            engine[sample.device] = max(engine.get(sample.device, 0), sample.engine_bytes)
    shares = [peak / timeline.total_bytes[d] for d, peak in peaks.items() if timeline.total_bytes.get(d)]
    in_use = breakdown.kv_in_use_peak_bytes
    if in_use is None and breakdown.kv_pool_bytes is not None and counters.kv_cache_usage_peak is not None:
        in_use = round(breakdown.kv_pool_bytes * counters.kv_cache_usage_peak)
    reason = timeline.reason or (None if peaks else "no sample fell into the round")
    return Memory(
        source=timeline.source,
        reason=reason or None,
        peak_bytes=peaks or None,
        peak_fraction=max(shares, default=None),
        engine_peak_bytes=engine or None,
        breakdown=Breakdown(
            weights_bytes=breakdown.weights_bytes,
            activation_peak_bytes=breakdown.activation_peak_bytes,
            kv_pool_bytes=breakdown.kv_pool_bytes,
            kv_in_use_peak_bytes=in_use,
        ),
    )


def _utilization(timeline: MemoryTimeline) -> dict[str, float] | None:
    by_device: dict[str, list[float]] = {}
    for sample in timeline.samples:
        if sample.utilization is not None:
            by_device.setdefault(sample.device, []).append(sample.utilization)
    return {device: float(np.mean(shares)) for device, shares in by_device.items()} or None


def _warnings(
    observation: RoundObservation,
    requests: Sequence[RequestRecord],
    values: Mapping[str, Any],
    others: str,
    block_size: int | None,
    shared_prefix_tokens: int | None,
) -> list[str]:
    notes = [
        failures_note(requests),
        prompts_note(requests),
        answers_note(requests),
        collected_note(requests),
        others or None,
        sample_warning({n: values[n] for n in ("ttft_ms", "itl_ms", "e2e_ms")}),
        deltas_warning(requests),
        wave_warning(observation),
    ]
    prompts = [r.prompt_tokens or r.prompt_tokens_planned or 0 for r in requests]
    if block_size is not None and prompts:
        if shared_prefix_tokens is not None:
            notes.append(prefix_note(shared_prefix_tokens, min(prompts), block_size))
        elif values["prefix_hit_rate"] == 0:
            notes.append(no_hits_note(prompts, block_size))
    return [note for note in notes if note]
