"""`summary.json`: what a study found, in numbers and in advice. Reads rounds back from disk, decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tuner.domain.setting import CHUNK_KNOB
from tuner.domain.measurement import Measurement, metric
from tuner.domain.experiment import Improvement, StudyFile, StudyTime, Summary, TableRow, Trial, TrialLine
from tuner.domain.profile import Objective, Profile
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, Workload
from tuner.measure import memory_note, relative_change
from tuner.study.choice import candidate_of, label_of, ranked, uses_plugin
from tuner.study.finals import observed
from tuner.experiment.store import StudyDirectory

IMPROVEMENT_METRICS = (
    "ttft_ms.p50",
    "ttft_ms.p90",
    "ttft_ms.p99",
    "cold_ttft_ms.p90",
    "itl_ms.p99",
    "tpot_ms.p50",
    "e2e_ms.p90",
    "request_throughput",
    "output_token_throughput",
)
LOW_HIT_RATE = 0.8


def build_summary(
    directory: StudyDirectory,
    study: StudyFile,
    profile: Profile,
    trials: Sequence[Trial],
    *,
    merged: Sequence[Trial],
    best: Trial | None,
    elapsed_s: float,
    earlier_s: float = 0.0,
) -> Summary:
    """The summary of the trials on disk; `merged` are the finals, one per configuration.

    `best` is one of them (or None); `elapsed_s` is this run's own time, `earlier_s` that of the runs before.
    """
    baseline = next((t for t in trials if t.role == "baseline" and t.state == "completed"), None)
    final_baseline = next((t for t in merged if baseline is not None and t.final_of == baseline.number), baseline)
    improvement = (
        {}
        if best is None or final_baseline is None or best is final_baseline
        else _improvement(directory, profile, final_baseline, best, trials)
    )
    return Summary(
        study=study.study,
        simulated=study.simulated,
        baseline=baseline.number if baseline else next((t.number for t in trials if t.role == "baseline"), None),
        best=best.number if best else None,
        improvement=improvement,
        advice=_advice(profile, trials, merged, best, baseline, improvement),
        trials=[_line(t, profile.objective) for t in trials],
        counts=dict(Counter(t.state for t in trials)),
        time=study_time(trials, elapsed_s + earlier_s),
        table=_table(trials, merged, best, profile.objective),
    )


def _improvement(
    directory: StudyDirectory, profile: Profile, baseline: Trial, best: Trial, trials: Sequence[Trial]
) -> dict[str, Improvement]:
    before = _observations(directory, baseline, trials)
    after = _observations(directory, best, trials)
    found = {}
    for path in dict.fromkeys([*profile.objective.metrics, *IMPROVEMENT_METRICS]):
        change = relative_change(
            baseline.rounds, best.rounds, path, baseline_observations=before, now_observations=after
        )
        if change.baseline is None or change.now is None or change.change is None:
            continue
        found[path] = Improvement(baseline=change.baseline, best=change.now, change=change.change, ci95=change.ci95)
    return found


def _observations(directory: StudyDirectory, merged: Trial, trials: Sequence[Trial]) -> list[Any]:
    """The rounds behind a merged final (all its starts), or behind a single trial."""
    if merged.role != "final":
        return observed(directory, merged)
    starts = [
        t for t in trials if t.role == "final" and t.state == "completed" and candidate_of(t) == candidate_of(merged)
    ]
    return [o for t in starts for o in observed(directory, t)]


def _line(trial: Trial, objective: Objective) -> TrialLine:
    values = {path: metric(trial.median, path) if trial.median else None for path in objective.metrics}
    return TrialLine(
        number=trial.number,
        role=trial.role,
        label=trial.label,
        state=trial.state,
        cause=trial.cause,
        knobs=knobs_of(trial),
        values=values,
        violations=trial.violations,
    )


def knobs_of(trial: Trial) -> dict[str, Any]:
    """The knobs in one mapping, the reuse budget under its own key."""
    knobs: dict[str, Any] = dict(trial.knobs)
    if trial.reuse_budget is not None:
        knobs["reuse_budget"] = trial.reuse_budget.to_json()
    return knobs


def study_time(trials: Sequence[Trial], spent_s: float) -> StudyTime:
    """Where `spent_s` went; what its trials spent is part of it, also where a file tells less."""
    start = sum(t.time.engine_start_s + t.time.stop_s for t in trials)
    load = sum(t.time.load_s for t in trials)
    total = max(spent_s, start + load)
    return StudyTime(total_s=total, engine_start_s=start, load_s=load, overhead_s=max(total - start - load, 0.0))


def chunk_of(trial: Trial) -> int | None:
    """The chunk size that ran, as far as it is known."""
    for source in (trial.effective_args or {}, trial.knobs, trial.engine_args):
        value = source.get(CHUNK_KNOB)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _table(
    trials: Sequence[Trial], merged: Sequence[Trial], best: Trial | None, objective: Objective
) -> list[TableRow]:
    """A row per chunk size (its best trial, finals first), the baseline and the references on rows of their own."""
    by_configuration = {candidate_of(t).model_dump_json(): t for t in merged}
    rows = []
    chunks: dict[int | None, list[Trial]] = {}
    for trial in trials:
        if trial.median is None or trial.state != "completed" or trial.role == "final":
            continue
        shown = by_configuration.get(candidate_of(trial).model_dump_json(), trial)
        if trial.role == "candidate":
            chunks.setdefault(chunk_of(trial), []).append(shown)
        else:
            rows.append(_row(shown, trial, best))
    # A configuration measured in the finals only: the best one with the plug-in once more without it.
    known = {candidate_of(t).model_dump_json() for t in trials if t.role != "final"}
    for configuration, trial in by_configuration.items():
        if configuration not in known:
            chunks.setdefault(chunk_of(trial), []).append(trial)
    for chunk in sorted(chunks, key=lambda c: (c is None, c)):
        group = chunks[chunk]
        has_best = [t for t in group if best is not None and candidate_of(t) == candidate_of(best)]
        top = (has_best or ranked(group, objective) or group)[0]
        rows.append(_row(top, top, best))
    return sorted(rows, key=lambda row: (row.max_num_batched_tokens or 0, row.trial))


def _row(shown: Trial, named: Trial, best: Trial | None) -> TableRow:
    median = shown.median or Measurement()
    ttft, memory = median.ttft_ms, median.memory
    pooled = shown.pooled.get("ttft_ms")
    peaks = memory.peak_bytes
    return TableRow(
        max_num_batched_tokens=chunk_of(shown) or chunk_of(named),
        trial=shown.number,
        label=named.label,
        memory_bytes=max(peaks.values()) if peaks else None,
        memory_source=memory.source,
        ttft_p50_ms=ttft.p50 if ttft else None,
        ttft_p90_ms=ttft.p90 if ttft else None,
        ttft_p99_ms=pooled.p99 if pooled else (ttft.p99 if ttft else None),
        prefix_hit_rate=median.prefix_hit_rate,
        prefill_chunks_per_request=median.prefill_chunks_per_request,
        best=best is not None and shown.number == best.number,
    )


def _advice(
    profile: Profile,
    trials: Sequence[Trial],
    merged: Sequence[Trial],
    best: Trial | None,
    baseline: Trial | None,
    improvement: dict[str, Improvement],
) -> list[str]:
    advice = []
    main = improvement.get(profile.objective.metrics[0])
    starts = [t for t in trials if baseline is not None and baseline.number in (t.number, t.final_of)]
    stock_holds = bool(starts) and not any(t.violations for t in starts)
    if stock_holds and main is not None and (main.ci95 is None or main.ci95[0] <= 0 <= main.ci95[1]):
        advice.append(
            "The winner cannot be told from the untouched configuration: the interval of the change includes zero. "
            "Keep stock, or measure with more rounds."
        )
    subject = best or next((t for t in trials if t.role == "baseline" and t.median), None)
    if subject is not None and subject.median is not None:
        advice += _hit_rate_advice(profile, subject.median)
        advice += _passed_over(profile.objective, subject, merged)
        preemptions = subject.median.preemptions
        if preemptions:
            advice.append(
                f"{preemptions:g} preemptions a round: the KV pool is too small for this load; raise "
                "gpu_memory_utilization, lower max_num_seqs or take more GPUs."
            )
    note = memory_note([t.median for t in trials if t.median is not None and t.state == "completed"])
    if note:
        advice.append(note)
    failed = Counter(t.cause for t in trials if t.state in ("infeasible", "engine_failed", "load_failed") and t.cause)
    for cause, count in failed.most_common():
        example = next(t for t in trials if t.cause == cause)
        advice.append(f"{count} x {cause}: {example.message}" + (f" {example.hint}" if example.hint else ""))
    return advice


def _passed_over(objective: Objective, chosen: Trial, merged: Sequence[Trial]) -> list[str]:
    """Why a configuration that measured better than the chosen one was not taken."""
    order = ranked(merged, objective)
    first = order[0] if order else chosen
    if not uses_plugin(first) or candidate_of(first) == candidate_of(chosen):
        return []
    return [
        f"With the scheduler plug-in, {label_of(candidate_of(first))} measured better, but not beyond the noise: more "
        "rounds would tell."
    ]


def _hit_rate_advice(profile: Profile, median: Measurement) -> list[str]:
    rate = median.prefix_hit_rate
    if rate is None or rate >= LOW_HIT_RATE:
        return []
    said = f"The prefix hit rate is {rate * 100:.0f} %"
    ceiling = _shared_share(profile.workload, median)
    if ceiling is not None and rate >= ceiling - 0.05:
        return [f"{said}; this load shares only {ceiling * 100:.0f} % of its tokens."]
    used = median.kv_cache_usage_peak
    if used is not None and used > 0.95:
        return [
            f"{said} and the KV pool is full ({used * 100:.0f} %): the cache thrashes. Give it "
            "more memory; below that, a reuse budget has nothing to keep."
        ]
    if profile.space.reuse_budget or ceiling is None:
        return [f"{said}: give the cache more memory, if this load shares more than that."]
    return [
        f"{said}: give the cache more memory, or put reuse_budget (max_cached_blocks, min_reuse_ratio) into the space."
    ]


def _shared_share(workload: Workload, median: Measurement) -> float | None:
    """The share of prompt tokens that can be found cached, 0 to 1; None where the load's content is not ours to know.

    Classes count as often as they were measured: some of them arrive by a clock of their own.
    """
    if isinstance(workload, SharedPrefixWorkload):
        parts = [(1, workload.system_prompt_tokens, workload.user_prompt_tokens)]
    elif isinstance(workload, MixedWorkload):
        counts = {name: latency.n for name, latency in median.groups.items()}
        parts = [(counts.get(c.name, 0), c.system_prompt_tokens, c.user_prompt_tokens) for c in workload.classes]
    else:
        return None
    shared = sum(n * sum(system) / 2 for n, system, _ in parts)
    whole = sum(n * (sum(system) + sum(user)) / 2 for n, system, user in parts)
    return shared / whole if whole else None
