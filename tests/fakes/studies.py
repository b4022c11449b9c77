"""Studies that never ran: domain values of every kind a report has to bear, made by formula and seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tuner.domain.setting import ReuseBudget, Scalar
from tuner.domain.measurement import Breakdown, Client, Latency, Measurement, Memory, metric
from tuner.domain.observation import MemorySample, MemoryTimeline
from tuner.domain.experiment import (
    Fingerprint,
    Improvement,
    Role,
    State,
    StudyFile,
    StudyTime,
    Summary,
    TableRow,
    Trial,
    TrialLine,
    TrialTime,
)
from tuner.report.data import ReportData

GIB = 2**30
DEVICES = ("GPU-0", "GPU-1")
CAPACITY = 80 * GIB
HOSTILE = "evil</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{7*7}}"
_P90_BY_CHUNK = {64: 863.0, 128: 327.0, 256: 110.0, 512: 107.0, 1024: 98.0, 2048: 96.0, 4096: 88.0, 8192: 84.0}
_START = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)


def latency(p90: float, spread: float = 0.35, n: int = 200) -> Latency:
    """A distribution around a P90."""
    return Latency(p50=p90 * (1 - spread), p90=p90, p99=p90 * (1 + spread), mean=p90 * (1 - spread / 1.2), n=n)


def measurement(p90: float, chunk: int | None, *, simulated: bool = False, hit_rate: float = 0.958) -> Measurement:
    """A round's numbers for a chunk size; None is a prefill in one step."""
    size = chunk or 8192
    activation = int(GIB * (0.6 + size / 2048))
    source = "simulated" if simulated else "nvml"
    return Measurement(
        ttft_ms=latency(p90),
        cold_ttft_ms=latency(p90 * 2.8, n=32),
        ttft_cached_ms=latency(p90 * 0.98, n=196),
        ttft_uncached_ms=None,
        itl_ms=latency(18 + size / 90),
        tpot_ms=latency(17 + size / 120),
        e2e_ms=latency(p90 + 420),
        request_throughput=3200 / (p90 + 60),
        output_token_throughput=51200 / (p90 + 60),
        goodput=3000 / (p90 + 60),
        goodput_share=0.94,
        failed_requests=0,
        requests=200,
        prefix_hit_rate=hit_rate,
        prefill_chunks_per_request=max(1.0, 83 / size),
        engine_steps=136 + 17000 / size,
        preemptions=0,
        kv_cache_usage_peak=0.41,
        kv_cache_tokens=412_000 - 9 * size,
        memory=Memory(
            source=source,
            peak_bytes=dict.fromkeys(DEVICES, 71 * GIB + activation // 40),
            peak_fraction=0.897,
            breakdown=Breakdown(
                weights_bytes=33 * GIB,
                activation_peak_bytes=activation,
                kv_pool_bytes=37 * GIB - activation,
                kv_in_use_peak_bytes=15 * GIB,
            ),
        ),
        gpu_utilization={DEVICES[0]: 0.83, DEVICES[1]: 0.81},
        client=Client(late_sends_p99_ms=0.4, max_in_flight=32),
        unmeasured={"ttft_uncached_ms": "no measured prompt was less than half cached"},
        oom_events=0,
    )


def trial(
    number: int,
    knobs: dict[str, Scalar],
    p90: float,
    *,
    role: Role = "candidate",
    state: State = "completed",
    label: str = "",
    budget: ReuseBudget | None = None,
    rounds: int = 3,
    seed: int = 0,
    simulated: bool = False,
    **more: Any,
) -> Trial:
    """A measured trial whose rounds scatter by a few percent around `p90`."""
    dice = random.Random(seed * 1000 + number)
    raw = knobs.get("max_num_batched_tokens")
    chunk = raw if isinstance(raw, int) else None
    measured = [measurement(p90 * (1 + dice.uniform(-0.05, 0.05)), chunk, simulated=simulated) for _ in range(rounds)]
    middle = sorted(measured, key=lambda m: m.ttft_ms.p90 if m.ttft_ms else 0.0)[len(measured) // 2]
    ci95 = {
        f"ttft_ms.{stat}": (value * 0.94, value * 1.07)
        for stat in ("p50", "p90", "p99")
        if (value := metric(middle, f"ttft_ms.{stat}")) is not None
    }
    base: dict[str, Scalar] = {"tensor_parallel_size": 4, "max_model_len": 8192, "max_num_seqs": 128}
    return Trial(
        number=number,
        role=role,
        label=label,
        state=state,
        simulated=simulated,
        engine_args={**base, **knobs},
        effective_args={**base, **knobs},
        knobs=knobs,
        reuse_budget=budget,
        command=["vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct"]
        + [f"--{name.replace('_', '-')}={value}" for name, value in {**base, **knobs}.items()],
        rounds=measured,
        median=middle,
        pooled={"ttft_ms": latency(p90, n=600)},
        ci95=ci95,
        started_at=(_START + timedelta(seconds=95 * number)).isoformat(),
        time=TrialTime(total_s=90, engine_start_s=48, load_s=36, stop_s=4),
        **more,
    )


def failed(number: int, chunk: int, cause: str, message: str, hint: str = "", state: State = "engine_failed") -> Trial:
    """A trial that ended before anything was measured."""
    knobs: dict[str, Scalar] = {"max_num_batched_tokens": chunk}
    return Trial(
        number=number,
        role="candidate",
        label=f"chunk {chunk}",
        state=state,
        cause=cause,
        message=message,
        hint=hint,
        engine_args=knobs,
        knobs=knobs,
        command=["vllm", "serve", "m", f"--max-num-batched-tokens={chunk}"],
        started_at=(_START + timedelta(seconds=95 * number)).isoformat(),
        time=TrialTime(total_s=31, engine_start_s=29, stop_s=2),
    )


def study_file(*, simulated: bool = False, model: str = "meta-llama/Llama-3.1-70B-Instruct") -> StudyFile:
    """The head of a study of the default load."""
    return StudyFile(
        study="chat-70b",
        profile={
            "version": 1,
            "name": "chat-70b",
            "model": model,
            "engine": {"args": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9}},
            "workload": {
                "kind": "shared-prefix",
                "system_prompt_tokens": 2048,
                "user_prompt_tokens": [32, 128],
                "output_tokens": [8, 24],
                "concurrency": 32,
                "requests": 200,
            },
            "rounds": 3,
            "space": {"max_num_batched_tokens": list(_P90_BY_CHUNK)},
            "objective": {"minimize": ["ttft_ms.p90"], "maximize": []},
            "constraints": ["ttft_ms.p99 <= 280", "itl_ms.p99 <= 120", "failed_requests == 0"],
        },
        fingerprint=Fingerprint(
            vllm_version="0.32.0",
            model=model,
            model_revision="5f0b02c",
            gpus=[{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": CAPACITY}] * 2,
            driver_version="580.95.05",
            engine="sim" if simulated else "vllm",
        ),
        space_sha256="1" * 64,
        workload_sha256="2" * 64,
        engine_kind="sim" if simulated else "vllm",
        simulated=simulated,
        versions={"chunktune": "0.1.0", "python": "3.11.7", "optuna": "5.0.0", "vllm": "0.32.0"},
        sampler="TPESampler",
        seed=7,
        created_at=_START.isoformat(),
        base_args={"tensor_parallel_size": 4},
    )


def summary_of(study: StudyFile, trials: Sequence[Trial], best: int | None, advice: Sequence[str] = ()) -> Summary:
    """A summary that agrees with its trials."""
    baseline = next((t for t in trials if t.role == "baseline"), None)
    again = next((t for t in trials if baseline is not None and t.final_of == baseline.number), baseline)
    winner = next((t for t in trials if t.number == best), None)
    improvement = {}
    if again is not None and winner is not None and again.median and winner.median:
        for path in ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "itl_ms.p99", "request_throughput"):
            before, after = metric(again.median, path), metric(winner.median, path)
            if before and after:
                change = after / before - 1
                improvement[path] = Improvement(
                    baseline=before, best=after, change=change, ci95=(change - 0.06, change + 0.05)
                )
    return Summary(
        study=study.study,
        simulated=study.simulated,
        baseline=None if baseline is None else baseline.number,
        best=best,
        improvement=improvement,
        advice=list(advice),
        trials=[_line(t) for t in trials],
        counts=dict(Counter(t.state for t in trials)),
        time=StudyTime(
            total_s=95.0 * len(trials),
            engine_start_s=52.0 * len(trials),
            load_s=36.0 * len(trials),
            overhead_s=7.0 * len(trials),
        ),
        table=[_row(t, best) for t in _one_per_chunk(trials)],
    )


def _line(t: Trial) -> TrialLine:
    value = None if t.median is None else metric(t.median, "ttft_ms.p90")
    return TrialLine(
        number=t.number,
        role=t.role,
        label=t.label,
        state=t.state,
        cause=t.cause,
        knobs=dict(t.knobs),
        values={"ttft_ms.p90": value},
        violations=t.violations,
    )


def _one_per_chunk(trials: Sequence[Trial]) -> list[Trial]:
    rows: dict[object, Trial] = {}
    for t in trials:
        if t.median is not None and t.reuse_budget is None:
            rows[t.knobs.get("max_num_batched_tokens", t.label)] = t
    return list(rows.values())


def _row(t: Trial, best: int | None) -> TableRow:
    m = t.median or Measurement()
    ttft = m.ttft_ms
    peak = m.memory.peak_bytes
    chunk = t.knobs.get("max_num_batched_tokens")
    return TableRow(
        max_num_batched_tokens=chunk if isinstance(chunk, int) else None,
        trial=t.number,
        label=t.label,
        memory_bytes=max(peak.values()) if peak else None,
        memory_source=m.memory.source,
        ttft_p50_ms=ttft.p50 if ttft else None,
        ttft_p90_ms=ttft.p90 if ttft else None,
        ttft_p99_ms=ttft.p99 if ttft else None,
        prefix_hit_rate=m.prefix_hit_rate,
        prefill_chunks_per_request=m.prefill_chunks_per_request,
        best=t.number == best,
    )


def timeline(chunk: int | None, *, from_s: float, simulated: bool = False, samples: int = 120) -> MemoryTimeline:
    """Twelve seconds of memory at ten a second, a bump where the prefill's activation peaks."""
    bump = GIB // 4 if chunk else 3 * GIB
    found = [
        MemorySample(
            at_s=from_s + i / 10,
            device=device,
            used_bytes=68 * GIB + (bump if 20 <= i % 60 <= 34 else 0) + (i * 2**20),
            utilization=0.4 + 0.5 * ((i * 7 % 10) / 10),
        )
        for i in range(samples)
        for device in DEVICES
    ]
    return MemoryTimeline(
        source="simulated" if simulated else "nvml", samples=found, total_bytes=dict.fromkeys(DEVICES, CAPACITY)
    )


def normal(*, simulated: bool = False, model: str = "meta-llama/Llama-3.1-70B-Instruct") -> ReportData:
    """A finished study: stock, no chunking, eight chunks, the scheduling variants, two failures, finals."""
    stock = trial(0, {}, 142.0, role="baseline", label="stock", simulated=simulated)
    no_chunking = trial(
        1, {"enable_chunked_prefill": False}, 180.0, role="reference", label="no_chunking", simulated=simulated
    )
    chunks = [
        trial(
            2 + i,
            {"max_num_batched_tokens": chunk},
            p90,
            label=f"chunk {chunk}",
            simulated=simulated,
            violations=["ttft_ms.p99 <= 280: 436"] if chunk <= 128 else [],
        )
        for i, (chunk, p90) in enumerate(_P90_BY_CHUNK.items())
    ]
    variants = [
        trial(
            10,
            {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 512},
            94.0,
            label="chunk 2048, long-prefill threshold 512",
            simulated=simulated,
        ),
        trial(
            11,
            {"max_num_batched_tokens": 2048},
            91.0,
            label="chunk 2048, reuse budget",
            budget=ReuseBudget(max_cached_blocks=128, min_reuse_ratio=0.8, yield_chunk_tokens=256),
            simulated=simulated,
        ),
    ]
    broken = [
        failed(
            12, 16, "invalid_combination", "max_num_batched_tokens (16) is below max_num_seqs (128)", "Leave it out."
        ),
        failed(13, 16384, "no_memory_for_kv", "1.2 GiB KV cache is needed, 0.4 GiB is available", state="infeasible"),
    ]
    finals = [
        trial(
            14,
            {"max_num_batched_tokens": 8192},
            84.5,
            role="final",
            label="chunk 8192",
            simulated=simulated,
            final_of=9,
        ),
        trial(15, {}, 141.0, role="final", label="stock", simulated=simulated, final_of=0),
    ]
    trials = [stock, no_chunking, *chunks, *variants, *broken, *finals]
    study = study_file(simulated=simulated, model=model)
    advice = ["NVML memory does not tell these configurations apart: vLLM preallocates its KV pool."]
    return ReportData(
        study=study,
        summary=summary_of(study, trials, 14, advice),
        trials=trials,
        timelines={
            t.number: [
                (n, timeline(_chunk(t), from_s=100.0 * t.number + 12 * n, simulated=simulated)) for n in (1, 2, 3)
            ]
            for t in trials
            if t.median is not None
        },
        ttfts_ms={t.number: ttfts(t) for t in trials if t.median is not None},
        merged=finals,
        importances={"max_num_batched_tokens": 0.81, "long_prefill_token_threshold": 0.12, "reuse_budget": 0.07},
    )


def _chunk(t: Trial) -> int | None:
    value = t.knobs.get("max_num_batched_tokens")
    return value if isinstance(value, int) else None


def ttfts(t: Trial, n: int = 600) -> list[float]:
    """Request TTFTs that fit the trial's P50 and P90 roughly."""
    dice = random.Random(t.number)
    middle = t.median.ttft_ms.p50 if t.median and t.median.ttft_ms else 100.0
    return [middle * dice.lognormvariate(0.0, 0.3) for _ in range(n)]


def simulated() -> ReportData:
    """The same, of the simulated engine."""
    return normal(simulated=True)


def hostile() -> ReportData:
    """The same, with a model name, a label and a failure that try to run a script."""
    data = normal(model=HOSTILE)
    trials = [
        t.model_copy(update={"label": HOSTILE, "command": ["vllm", "serve", HOSTILE]}) if t.number in (3, 14) else t
        for t in data.trials
    ]
    trials[12] = trials[12].model_copy(update={"message": HOSTILE, "cause": HOSTILE})
    study = data.study.model_copy(update={"study": HOSTILE})
    summary = summary_of(study, trials, 14, [HOSTILE])
    return replace(
        data,
        study=study,
        summary=summary,
        trials=trials,
        merged=[t for t in trials if t.role == "final"],
        importances={HOSTILE: 1.0},
        missing=[HOSTILE],
    )


def failures_only() -> ReportData:
    """Nothing could be measured."""
    gated = "Cannot access gated repo for meta-llama/Llama-3.1-70B-Instruct"
    trials = [failed(n, 128 << n, "gated_model", gated, "Set HF_TOKEN.") for n in range(3)]
    trials.append(failed(3, 4096, "stalled", "no token for 60 s", state="load_failed"))
    study = study_file()
    return ReportData(study, summary_of(study, trials, None), trials, importances_reason="no trial was measured")


def one_trial() -> ReportData:
    """Stopped after the baseline."""
    trials = [trial(0, {}, 142.0, role="baseline", label="stock")]
    study = study_file()
    return ReportData(
        study, summary_of(study, trials, None), trials, ttfts_ms={0: ttfts(trials[0])}, importances_reason="one trial"
    )


def null_metrics() -> ReportData:
    """A server that says almost nothing: no hit rate, no memory, no counters, no TTFT in one trial."""
    reason = "the server has no /metrics"
    bare = {
        "prefix_hit_rate": None,
        "prefill_chunks_per_request": None,
        "engine_steps": None,
        "preemptions": None,
        "kv_cache_usage_peak": None,
        "kv_cache_tokens": None,
        "gpu_utilization": None,
        "memory": Memory(source="unavailable", reason="no NVML here"),
        "itl_ms": None,
        "request_throughput": None,
        "unmeasured": {"prefix_hit_rate": reason, "kv_cache_usage_peak": reason},
    }
    data = normal()
    trials = [
        t
        if t.median is None
        else t.model_copy(
            update={
                "median": t.median.model_copy(update={**bare, **({"ttft_ms": None} if t.number == 4 else {})}),
                "rounds": [r.model_copy(update=bare) for r in t.rounds],
                "ci95": {},
            }
        )
        for t in data.trials
    ]
    summary = summary_of(data.study, trials, 14)
    return ReportData(data.study, summary, trials, importances_reason="not enough trials")


def thousand() -> ReportData:
    """A thousand trials over three knobs."""
    dice = random.Random(3)
    trials = [trial(0, {}, 142.0, role="baseline", label="stock")]
    for number in range(1, 1000):
        chunk = 16 * dice.randint(8, 512)
        p90 = 84 + 20000 / chunk + dice.uniform(0, 30)
        knobs: dict[str, Scalar] = {
            "max_num_batched_tokens": chunk,
            "long_prefill_token_threshold": dice.choice([0, 512, 1024]),
        }
        trials.append(trial(number, knobs, p90, label=f"chunk {chunk}", seed=3))
    best = min(trials, key=lambda t: t.median.ttft_ms.p90 if t.median and t.median.ttft_ms else 1e9)
    study = study_file()
    return ReportData(
        study,
        summary_of(study, trials, best.number),
        trials,
        timelines={n: [(1, timeline(512, from_s=float(n)))] for n in range(0, 1000, 50)},
        ttfts_ms={t.number: ttfts(t, 50) for t in trials},
        importances={"max_num_batched_tokens": 0.9, "long_prefill_token_threshold": 0.1},
    )


def class_objective() -> ReportData:
    """One that optimizes what no usual column shows: a class's TTFT and the output throughput."""
    data = normal()
    objective = {"minimize": ["groups.short.p90"], "maximize": ["output_token_throughput"]}
    study = data.study.model_copy(update={"profile": {**data.study.profile, "objective": objective}})
    trials = [
        t
        if t.median is None or t.median.ttft_ms is None
        else t.model_copy(
            update={
                "median": t.median.model_copy(
                    update={"groups": {"short": latency(t.median.ttft_ms.p90 / 2), "long": latency(900.0)}}
                )
            }
        )
        for t in data.trials
    ]
    return replace(data, study=study, trials=trials, merged=[t for t in trials if t.role == "final"])


ALL = {
    "normal": normal,
    "simulated": simulated,
    "hostile": hostile,
    "failures_only": failures_only,
    "one_trial": one_trial,
    "null_metrics": null_metrics,
    "thousand": thousand,
    "class_objective": class_objective,
}
"""Every kind, by name."""
