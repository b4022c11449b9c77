"""What a study advises beside its verdict: short sentences, each with the next step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tuner.domain.experiment import STOCK_ID, Results, SettingLine
from tuner.domain.measurement import Measurement
from tuner.domain.profile import Profile
from tuner.domain.units import counted
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, Workload
from tuner.engine.causes import CAUSES
from tuner.measure import memory_note
from tuner.study.ledger import given_up
from tuner.study.problem import Problem
from tuner.study.verdict import Decision

LOW_HIT_RATE = 0.8
_FULL_POOL = 0.95
_NAMED = 5
"""Settings that one sentence names."""


def advice(
    profile: Profile,
    problem: Problem,
    results: Results,
    lines: Sequence[SettingLine],
    finals: Sequence[SettingLine],
    decision: Decision,
) -> list[str]:
    """Sentences for people, the most useful first."""
    found = []
    chosen = decision.winner if decision.winner is not None else STOCK_ID
    median = next((line.median for line in [*finals, *lines] if line.id == chosen and line.median), None)
    if median is not None:
        found += _hit_rate(profile, median)
        if median.preemptions:
            found.append(
                f"{median.preemptions:g} preemptions a round: the KV pool is too small for this load. Raise "
                "gpu_memory_utilization, lower max_num_seqs or take more GPUs."
            )
    if not problem.live:
        note = memory_note([line.median for line in lines if line.median is not None])
        found += [note] if note else []
    return found + _out_of_time(problem, results) + _failures(results) + _given_up(results)


def _out_of_time(problem: Problem, results: Results) -> list[str]:
    """Settings of the list that no start measured before the finals began."""
    if problem.time_s is None or not any(s.purpose == "final" for s in results.starts):
        return []
    seen = {setting.key for _, setting in results.settings()}
    listed = [s for group in problem.groups if len(group.settings) <= problem.max_settings for s in group.settings]
    left = [s.label for s in listed if s.key not in seen]
    if not left:
        return []
    named = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
    return [
        f"The time budget was used up before {counted(len(left), 'setting')} could be measured ({named}). "
        "To measure all of them, run it again with --fresh and a larger --budget."
    ]


def _failures(results: Results) -> list[str]:
    """The causes for which starts failed, each once, with what to do."""
    failed = [s for s in results.starts if s.cause and s.state in ("infeasible", "engine_failed", "load_failed")]
    sentences = []
    for cause, count in Counter(s.cause for s in failed).most_common():
        example = next(s for s in failed if s.cause == cause)
        times = f"{count} starts" if count > 1 else f"Start {example.number}"
        said = f"{times} failed with {cause}: {(example.message or 'no reason was given').rstrip('.')}."
        sentences.append(f"{said} {example.hint}" if example.hint else said)
    return sentences


def _given_up(results: Results) -> list[str]:
    """Why measurements were given up after every round of them was discarded: each cause once, with what to do."""
    lost = given_up(results)
    last = {key: r for r in results.rounds if (key := (r.start, r.cycle, r.setting)) in lost}
    sentences = []
    for code, count in Counter(r.code or "unknown" for r in last.values()).most_common():
        reason = next(r.reason for r in reversed(last.values()) if (r.code or "unknown") == code)
        said = f"{counted(count, 'measurement')} gave no round that counts ({code}), the last one because {reason}."
        hint = CAUSES[code].hint if code in CAUSES else ""
        sentences.append(f"{said} {hint}" if hint else said)
    return sentences


def _hit_rate(profile: Profile, median: Measurement) -> list[str]:
    rate = median.prefix_hit_rate
    if rate is None or rate >= LOW_HIT_RATE:
        return []
    said = f"The prefix hit rate is {rate * 100:.0f} %"
    ceiling = _shared_share(profile.workload, median)
    if ceiling is not None and rate >= ceiling - 0.05:
        return [f"{said}; this load shares only {ceiling * 100:.0f} % of its tokens."]
    used = median.kv_cache_usage_peak
    if used is not None and used > _FULL_POOL:
        return [f"{said} and the KV pool is full ({used * 100:.0f} %): prefixes are evicted. Give it more memory."]
    if profile.space.reuse_budget or ceiling is None:
        return [f"{said}. Give the cache more memory, if this load shares more than that."]
    return [
        f"{said}, and this load shares {ceiling * 100:.0f} % of its tokens. Give the cache more memory, or put "
        "reuse_budget (max_cached_blocks, min_reuse_ratio) into the space."
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
