"""Studies that never ran: domain values of every kind a report has to bear, made by formula and seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tuner.domain.experiment import (
    STOCK_ID,
    Contrast,
    Fingerprint,
    Purpose,
    Results,
    Round,
    SettingId,
    SettingLine,
    Start,
    StartState,
    StartTime,
    StudyFile,
    StudySummary,
    StudyTime,
    TableRow,
)
from tuner.domain.measurement import Breakdown, Client, Latency, Measurement, Memory, metric
from tuner.domain.observation import MemorySample, MemoryTimeline
from tuner.domain.setting import CHUNK_KNOB, STOCK, ReuseBudget, Scalar, Setting
from tuner.experiment.design import Named
from tuner.report.data import ReportData

GIB = 2**30
DEVICES = ("GPU-0", "GPU-1")
CAPACITY = 80 * GIB
MODEL = "meta-llama/Llama-3.1-70B-Instruct"
HOSTILE = "evil</script><script>document.title='owned'</script><img src=x onerror=alert(1)>{{7*7}}"
STOCK_CHUNK = 8192
COMMAND = ("vllm", "serve", MODEL, "--tensor-parallel-size=4", "--max-num-batched-tokens=2048")
_P90_BY_CHUNK = {64: 863.0, 128: 327.0, 256: 110.0, 512: 107.0, 1024: 98.0, 2048: 84.0, 4096: 88.0}
_WINNER, _RUNNER_UP = 5, 6
_BEGAN = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)
_METRICS = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "itl_ms.p99", "request_throughput")


def latency(p90: float, spread: float = 0.35, n: int = 200) -> Latency:
    """A distribution around a P90."""
    return Latency(p50=p90 * (1 - spread), p90=p90, p99=p90 * (1 + spread), mean=p90 * (1 - spread / 1.2), n=n)


def measurement(p90: float, chunk: int | None = None, *, simulated: bool = False) -> Measurement:
    """A round's numbers for a chunk size; None is stock's."""
    size = chunk or STOCK_CHUNK
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
        prefix_hit_rate=0.958,
        prefill_chunks_per_request=max(1.0, 83 / size),
        engine_steps=136 + 17000 / size,
        preemptions=0,
        kv_cache_usage_peak=0.41,
        kv_cache_tokens=412_000,
        memory=Memory(
            source="simulated" if simulated else "nvml",
            peak_bytes=dict.fromkeys(DEVICES, int(71.1 * GIB)),
            peak_fraction=0.897,
            breakdown=Breakdown(weights_bytes=33 * GIB, kv_pool_bytes=37 * GIB, kv_in_use_peak_bytes=15 * GIB),
        ),
        gpu_utilization={DEVICES[0]: 0.83, DEVICES[1]: 0.81},
        client=Client(late_sends_p99_ms=0.4, max_in_flight=32),
        unmeasured={"ttft_uncached_ms": "no measured prompt was less than half cached"},
        oom_events=0,
    )


def start(
    number: int,
    purpose: Purpose = "search",
    settings: Mapping[SettingId, Setting] | None = None,
    *,
    state: StartState = "completed",
    **more: Any,
) -> Start:
    """An engine start of four minutes, two of them load."""
    defined = settings or {STOCK_ID: STOCK}
    args: dict[str, Scalar] = {"tensor_parallel_size": 4, "max_num_seqs": 128}
    fields: dict[str, Any] = {
        "label": purpose,
        "engine_args": args,
        "stock_chunk": STOCK_CHUNK,
        "command": list(COMMAND),
        "live": purpose in ("search", "final"),
        "start_s": 110.0,
        "settings": list(defined),
        "defined": {str(name): setting for name, setting in defined.items()},
        "started_at": (_BEGAN + timedelta(seconds=250 * number - 250)).isoformat(),
        "time": StartTime(total_s=240, engine_start_s=110, load_s=120, stop_s=5),
    }
    return Start(number=number, purpose=purpose, state=state, **{**fields, **more})


def failed(number: int, named: Named, state: StartState, cause: str, message: str, hint: str = "") -> Start:
    """A start that never became ready."""
    time = StartTime(total_s=31, engine_start_s=29, stop_s=2)
    more = {
        "cause": cause,
        "message": message,
        "hint": hint,
        "time": time,
        "start_s": 0.0,
        "label": named.setting.label,
    }
    return start(number, "search", {named.id: named.setting}, state=state, live=False, **more)


def cycle(number: int, in_start: int, p90s: Mapping[SettingId, tuple[Setting, float]], first: int = 1) -> list[Round]:
    """One round of each setting, a few percent around its P90; the whole cycle is a little slow or fast."""
    dice = random.Random(number)
    pace = 1 + dice.uniform(-0.03, 0.03)
    return [
        Round(
            start=in_start,
            round=first + position,
            cycle=number,
            position=position,
            setting=name,
            state="kept",
            load_s=5.0,
            measurement=measurement(p90 * pace * (1 + dice.uniform(-0.02, 0.02)), setting.chunk),
        )
        for position, (name, (setting, p90)) in enumerate(p90s.items())
    ]


def discarded(row: Round, reason: str) -> Round:
    """The same round, not counted."""
    return row.model_copy(update={"state": "discarded", "reason": reason, "code": "client_limited"})


def line(name: SettingId, setting: Setting, rounds: Sequence[Round], **more: Any) -> SettingLine:
    """A setting's line made of those of `rounds` that are its own; stock's are what it is compared with."""
    own = sorted((r.measurement for r in rounds if r.setting == name), key=_p90)
    stock = sorted((r.measurement for r in rounds if r.setting == STOCK_ID), key=_p90)
    middle = own[len(own) // 2] if own else None
    ci95, contrasts = {}, {}
    for path in _METRICS:
        value = None if middle is None else metric(middle, path)
        if value is not None:
            ci95[path] = (value * 0.94, value * 1.07)
        before = metric(stock[len(stock) // 2], path) if stock else None
        if value is not None and before and name != STOCK_ID:
            change = value / before - 1
            contrasts[path] = Contrast(change=change, ci95=(change - 0.06, change + 0.05))
    fields: dict[str, Any] = {"state": "measured", "p_feasible": None if middle is None else 0.97}
    return SettingLine(
        id=name,
        label=setting.label,
        knobs=setting.flat(),
        starts=len({r.start for r in rounds if r.setting == name}),
        rounds=len(own),
        median=middle,
        ci95=ci95,
        vs_stock=contrasts,
        **{**fields, **more},
    )


def _p90(found: Measurement) -> float:
    return found.ttft_ms.p90 if found.ttft_ms else 0.0


def study_file(*, simulated: bool = False, model: str = MODEL) -> StudyFile:
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
            "space": {CHUNK_KNOB: list(_P90_BY_CHUNK)},
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
        workload_sha256="2" * 64,
        engine_kind="sim" if simulated else "vllm",
        simulated=simulated,
        versions={"chunktune": "0.1.0", "python": "3.11.7", "optuna": "5.0.0", "vllm": "0.32.0"},
        design={"sampler": "enumeration", "live": True},
        seed=7,
        created_at=_BEGAN.isoformat(),
    )


def summary(study: StudyFile, lines: Sequence[SettingLine], starts: Sequence[Start], **more: Any) -> StudySummary:
    """A summary with a table of those settings that were measured."""
    n = len(starts)
    fields: dict[str, Any] = {
        "verdict": "none",
        "sentence": "Nothing is decided yet.",
        "winner": None,
        "starts": [f"start {s.number}, {s.label}: {s.state}" for s in starts],
        "counts": dict(Counter(s.state for s in lines)),
        "time": StudyTime(total_s=250.0 * n, engine_start_s=115.0 * n, load_s=120.0 * n, overhead_s=15.0 * n, starts=n),
    }
    fields |= more
    table = [table_row(s, winner=s.id == fields["winner"]) for s in lines if s.median is not None]
    fields = {"table": table} | fields
    return StudySummary(study=study.study, simulated=study.simulated, settings=list(lines), **fields)


def table_row(found: SettingLine, *, winner: bool = False) -> TableRow:
    median = found.median or Measurement()
    ttft, peak = median.ttft_ms, median.memory.peak_bytes
    chunk = found.knobs.get(CHUNK_KNOB)
    return TableRow(
        max_num_batched_tokens=chunk if isinstance(chunk, int) else STOCK_CHUNK if found.id == STOCK_ID else None,
        setting=found.id,
        label=found.label,
        memory_bytes=max(peak.values()) if peak else None,
        memory_source=median.memory.source,
        ttft_p50_ms=ttft.p50 if ttft else None,
        ttft_p90_ms=ttft.p90 if ttft else None,
        ttft_p99_ms=ttft.p99 if ttft else None,
        prefix_hit_rate=median.prefix_hit_rate,
        prefill_chunks_per_request=median.prefill_chunks_per_request,
        violates=["ttft_ms.p99 <= 280"] if ttft and ttft.p99 > 280 else [],
        winner=winner,
    )


def timeline(*, simulated: bool = False, samples: int = 50) -> MemoryTimeline:
    """Five seconds of memory and utilisation at ten a second; times since the round began."""
    found = [
        MemorySample(
            at_s=i / 10,
            device=device,
            used_bytes=71 * GIB + (GIB // 4 if 20 <= i % 60 <= 34 else 0),
            utilization=0.4 + 0.5 * ((i * 7 % 10) / 10),
        )
        for i in range(samples)
        for device in DEVICES
    ]
    return MemoryTimeline("simulated" if simulated else "nvml", found, dict.fromkeys(DEVICES, CAPACITY))


def ttfts(p50: float, seed: int, n: int = 600) -> list[float]:
    """Request TTFTs around a median."""
    dice = random.Random(seed)
    return [p50 * dice.lognormvariate(0.0, 0.3) for _ in range(n)]


def normal(*, simulated: bool = False, model: str = MODEL) -> ReportData:
    """A finished study: one search start, a refused chunk, three final starts, the literal start; chunk 2048 wins."""
    chunks = {n: Setting(knobs={CHUNK_KNOB: chunk}) for n, chunk in enumerate(_P90_BY_CHUNK)}
    budget = ReuseBudget(max_cached_blocks=128, min_reuse_ratio=0.8)
    others = {
        7: (Setting(knobs={CHUNK_KNOB: 2048, "long_prefill_token_threshold": 512}), 94.0),
        8: (Setting(knobs={CHUNK_KNOB: 2048}, reuse_budget=budget), 91.0),
        9: (Setting(knobs={"enable_chunked_prefill": False}), 180.0),
    }
    p90s: dict[SettingId, tuple[Setting, float]] = {STOCK_ID: (STOCK, 142.0)}
    p90s |= {n: (s, _P90_BY_CHUNK[s.chunk or 0]) for n, s in chunks.items()} | others
    refused = {10: Setting(knobs={CHUNK_KNOB: 32}), 11: Setting(knobs={CHUNK_KNOB: 16384})}
    left = {n: p90s[n] for n in (STOCK_ID, 2, 3, 4, _WINNER, _RUNNER_UP, 8)}
    rounds = cycle(0, 2, p90s) + cycle(1, 2, p90s, 12) + cycle(2, 2, p90s, 23) + cycle(3, 2, left, 34)
    rounds[4] = discarded(rounds[4], "the client was 12 ms late")
    finalists = {n: p90s[n] for n in (STOCK_ID, _WINNER, _RUNNER_UP)}
    finals = [r for n in (3, 4, 5) for c in range(3) for r in cycle(3 * n + c - 5, n, finalists, 3 * c + 1)]
    literal_rounds = cycle(13, 6, {_WINNER: p90s[_WINNER]})
    measured = {name: setting for name, (setting, _) in p90s.items()}
    starts = [
        failed(
            1,
            Named(11, refused[11]),
            "infeasible",
            "no_memory_for_kv",
            "1.2 GiB is needed, 0.4 GiB is available",
            "Lower it.",
        ),
        start(2, "search", measured),
        *(start(n, "final", {k: v for k, (v, _) in finalists.items()}, label=f"final {n - 2} of 3") for n in (3, 4, 5)),
        start(6, "literal", {_WINNER: measured[_WINNER]}),
    ]
    eliminated = {n: {"state": "eliminated", "cause": "slower than stock beyond doubt"} for n in (0, 1, 7, 9)}
    unfit = {n: {"p_feasible": 0.01} for n in (0, 1)}
    kept = [r for r in rounds if r.kept]
    lines = [line(n, s, kept, **eliminated.get(n, {}), **unfit.get(n, {})) for n, (s, _) in p90s.items()]
    lines += [
        line(10, refused[10], [], state="infeasible", cause="chunk_below_max_num_seqs"),
        line(11, refused[11], [], state="infeasible", cause="no_memory_for_kv"),
    ]
    study = study_file(simulated=simulated, model=model)
    told = summary(
        study,
        lines,
        starts,
        verdict="better",
        sentence="Chunk 2048 lowers TTFT P90 by 41 % against stock (95 % interval -47 % to -36 %)",
        winner=_WINNER,
        finals=[line(n, s, finals) for n, (s, _) in finalists.items()],
        advice=["NVML memory does not tell these settings apart: vLLM preallocates its KV pool."],
    )
    return ReportData(
        study=study,
        summary=told,
        results=Results(starts, rounds + finals + literal_rounds, elapsed_s=told.time.total_s),
        timelines={n: {k: timeline(simulated=simulated) for k in range(1, 10)} for n in (2, 3, 4, 5)},
        ttfts_ms={n: ttfts(p90 * 0.65, seed) for seed, (n, (_, p90)) in enumerate(finalists.items())},
        importances={CHUNK_KNOB: 0.81, "long_prefill_token_threshold": 0.12, "reuse_budget": 0.07},
        command=COMMAND,
    )


def simulated() -> ReportData:
    """The same, of the simulated engine."""
    return normal(simulated=True)


def stock_wins() -> ReportData:
    """No setting is better than stock beyond doubt."""
    data = normal()
    told = "Stock is frozen: chunk 2048 measured 1.2 % lower in TTFT P90, which is too small to see"
    finals = [
        s.model_copy(update={"vs_stock": {"ttft_ms.p90": Contrast(change=-0.012, ci95=(-0.05, 0.03))}})
        if s.id == _WINNER
        else s
        for s in data.summary.finals
    ]
    table = [r.model_copy(update={"winner": r.setting == STOCK_ID}) for r in data.summary.table]
    changes = {"verdict": "stock", "sentence": told, "winner": STOCK_ID, "finals": finals, "table": table}
    return replace(data, summary=data.summary.model_copy(update=changes))


def hostile() -> ReportData:
    """The first one, with a model name, labels, causes and messages that try to run a script."""
    data = normal(model=HOSTILE)
    starts = [
        s.model_copy(update={"message": HOSTILE, "cause": HOSTILE, "label": HOSTILE}) for s in data.results.starts
    ]
    rows = [r.model_copy(update={"reason": HOSTILE}) if not r.kept else r for r in data.results.rounds]
    renamed = {"label": HOSTILE, "cause": HOSTILE}
    lines = [s.model_copy(update=renamed) if s.id in (3, _WINNER, 11) else s for s in data.summary.settings]
    finals = [s.model_copy(update=renamed) if s.id == _WINNER else s for s in data.summary.finals]
    study = data.study.model_copy(update={"study": HOSTILE})
    told = {"study": HOSTILE, "settings": lines, "finals": finals, "advice": [HOSTILE], "sentence": f"Take {HOSTILE}"}
    table = [table_row(s, winner=s.id == _WINNER) for s in lines if s.median is not None]
    return replace(
        data,
        study=study,
        summary=data.summary.model_copy(update={**told, "table": table}),
        results=Results(starts, rows),
        importances={HOSTILE: 0.7, "other": 0.3},
        command=("vllm", "serve", HOSTILE),
        missing=[HOSTILE],
    )


def failures_only() -> ReportData:
    """Nothing could be measured."""
    settings = {n: Setting(knobs={CHUNK_KNOB: 128 << n}) for n in range(3)}
    gated = "Cannot access gated repo for meta-llama/Llama-3.1-70B-Instruct"
    hint = "Set HF_TOKEN."
    starts = [failed(n + 1, Named(n, s), "engine_failed", "gated_model", gated, hint) for n, s in settings.items()]
    lines = [line(n, s, [], state="failed", cause="gated_model") for n, s in settings.items()]
    study = study_file()
    told = summary(study, lines, starts, sentence="Nothing could be measured: 3 of 3 starts failed with gated_model")
    return ReportData(study, told, Results(starts, []), importances_reason="no setting was measured")


def unfinished() -> ReportData:
    """Stopped after two rounds of stock."""
    starts = [start(1, state="interrupted")]
    rounds = cycle(0, 1, {STOCK_ID: (STOCK, 142.0)}) + cycle(1, 1, {STOCK_ID: (STOCK, 142.0)}, 2)
    study = study_file()
    told = summary(study, [line(STOCK_ID, STOCK, rounds)], starts, sentence="The study has not ended: 2 rounds so far")
    ttft = {STOCK_ID: ttfts(92.0, 0)}
    return ReportData(study, told, Results(starts, rounds), ttfts_ms=ttft, importances_reason="one setting")


def null_metrics() -> ReportData:
    """A server that says almost nothing: no hit rate, no memory, no counters, no inter-token latency."""
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

    def stripped(found: SettingLine) -> SettingLine:
        median = None if found.median is None else found.median.model_copy(update=bare)
        return found.model_copy(update={"median": median, "ci95": {}, "vs_stock": {}, "p_feasible": None})

    lines, finals = map(stripped, data.summary.settings), map(stripped, data.summary.finals)
    rows = [r.model_copy(update={"measurement": r.measurement.model_copy(update=bare)}) for r in data.results.rounds]
    told = summary(data.study, list(lines), data.results.starts, verdict="better", winner=_WINNER, finals=list(finals))
    return ReportData(data.study, told, Results(data.results.starts, rows), importances_reason="not enough settings")


def many() -> ReportData:
    """Three hundred settings over two knobs, one start each."""
    dice = random.Random(3)
    p90s: dict[SettingId, tuple[Setting, float]] = {STOCK_ID: (STOCK, 142.0)}
    for number in range(300):
        chunk = 16 * dice.randint(8, 512)
        knobs: dict[str, Scalar] = {CHUNK_KNOB: chunk, "long_prefill_token_threshold": dice.choice([64, 96, 112])}
        p90s[number] = (Setting(knobs=knobs), 84 + 20000 / chunk + dice.uniform(0, 30))
    rounds = [r for n in range(3) for r in cycle(n, 1, p90s, 301 * n + 1)]
    starts = [start(n + 1, "single", {name: s}) for n, (name, (s, _)) in enumerate(p90s.items())]
    lines = [line(name, s, rounds) for name, (s, _) in p90s.items()]
    study = study_file()
    best = min((s for s in lines if s.id != STOCK_ID), key=lambda s: _p90(s.median or Measurement()))
    sentence = f"{best.label} lowers TTFT P90"
    told = summary(study, lines, starts, verdict="better", winner=best.id, sentence=sentence)
    return ReportData(
        study,
        told,
        Results(starts, rounds),
        importances={CHUNK_KNOB: 0.9, "long_prefill_token_threshold": 0.1},
        command=COMMAND,
    )


def class_objective() -> ReportData:
    """One that optimizes what no usual column shows: a class's TTFT and the output throughput."""
    data = normal()
    objective = {"minimize": ["groups.short.p90"], "maximize": ["output_token_throughput"]}

    def with_class(found: SettingLine) -> SettingLine:
        if found.median is None:
            return found
        groups = {"short": latency(_p90(found.median) / 2), "long": latency(900.0)}
        return found.model_copy(update={"median": found.median.model_copy(update={"groups": groups})})

    lines, finals = map(with_class, data.summary.settings), map(with_class, data.summary.finals)
    told = data.summary.model_copy(update={"settings": list(lines), "finals": list(finals)})
    study = data.study.model_copy(update={"profile": {**data.study.profile, "objective": objective}})
    return replace(data, study=study, summary=told)


ALL = {
    "normal": normal,
    "simulated": simulated,
    "stock_wins": stock_wins,
    "hostile": hostile,
    "failures_only": failures_only,
    "unfinished": unfinished,
    "null_metrics": null_metrics,
    "many": many,
    "class_objective": class_objective,
}
"""Every kind, by name."""
