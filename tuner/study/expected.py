"""How long a sweep is going to take: from what was measured, else from a stated assumption."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tuner.domain.experiment import Fingerprint, Results
from tuner.domain.profile import Profile
from tuner.domain.units import counted, format_duration
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, workload_sha256
from tuner.errors import ChunktuneError
from tuner.experiment.store import Store
from tuner.study.design import Outlook

_ENGINE_START_S = 240.0
_SIMULATED_START_S = 3.0
_TOKEN_S = 0.03
"""Between two tokens of an answer."""
_PREFILL_TOKENS_S = 20_000.0
_UNKNOWN_ROUND_S = 30.0
_WARM_UP_SHARE = 0.3
"""Of a round: a warm-up is one wave of requests at full concurrency."""
_ASSUMPTION_RANGE = 2.0
_MEASURED_RANGE = 1.15
_STUDIES_READ = 20


@dataclass(frozen=True)
class Pace:
    """What the parts of a sweep take, in seconds."""

    start_s: float
    """An engine start and its stop."""
    round_s: float
    warm_up_s: float
    """Of one chunk size; each has one in each start."""
    source: str
    """Where these come from, as the end of a sentence: `assumed`, `as in study chat-70b`."""
    range: float
    """Factor within which they are believed."""


@dataclass(frozen=True)
class Expected:
    """What is still to come."""

    starts: int
    seconds: float
    low_s: float
    high_s: float
    sentence: str


def expect(outlook: Outlook, pace: Pace, left_s: float | None = None) -> Expected:
    """The time of what is still to come, with its range.

    `left_s` is what is left of the time budget: it is kept within a start, but never costs the finals.
    """
    if not outlook.starts:
        return Expected(0, 0.0, 0.0, 0.0, "nothing is left to measure")
    seconds = _seconds(outlook.starts, outlook.rounds, outlook, pace)
    low_s = _seconds(outlook.least_starts, outlook.least_rounds, outlook, pace) / pace.range
    high_s = _seconds(outlook.most_starts, outlook.most_rounds, outlook, pace) * pace.range
    over = ""
    if left_s is not None:
        needed_s = _seconds(outlook.least_starts, outlook.needed_rounds, outlook, pace)
        if needed_s > left_s + pace.start_s:
            over = "; the finals need more than the time budget, and are held in any case"
        most_s = max(left_s + pace.start_s, needed_s)
        low_s, seconds, high_s = (min(value, most_s) for value in (low_s, seconds, high_s))
    few, many = outlook.least_starts, outlook.most_starts
    starts = counted(outlook.starts, "engine start") + (f" ({few} to {many})" if few != many else "")
    settings = f", {counted(outlook.settings, 'setting')}" if outlook.settings else ""
    cycles = f" in about {counted(outlook.cycles, 'cycle')}" if outlook.cycles else ""
    return Expected(
        outlook.starts,
        seconds,
        low_s,
        high_s,
        f"expected: {starts}{settings}{cycles}, {format_duration(seconds)} "
        f"({format_duration(low_s)} to {format_duration(high_s)}), with {format_duration(pace.start_s)} a start and "
        f"{format_duration(pace.round_s)} a round, {pace.source}{over}",
    )


def _seconds(starts: int, rounds: int, outlook: Outlook, pace: Pace) -> float:
    # The first of the starts to come warms every chunk up, those of the finals the three of theirs.
    warm_ups = min(starts, 1) * min(outlook.settings, rounds) + 3 * max(starts - 1, 0)
    return starts * pace.start_s + rounds * pace.round_s + warm_ups * pace.warm_up_s


def assumed(profile: Profile, *, simulated: bool) -> Pace:
    """Without any measurement: four minutes for an engine, and a round by its tokens."""
    round_s = _assumed_round_s(profile)
    start_s = _SIMULATED_START_S if simulated else _ENGINE_START_S
    return Pace(start_s, round_s, _WARM_UP_SHARE * round_s, "assumed until it is measured", _ASSUMPTION_RANGE)


def measured(results: Results, source: str) -> Pace | None:
    """From starts with rounds that count, which bear the discarded ones and the pauses; None without any."""
    starts, rounds, warm_ups = [], [], []
    for start in results.starts:
        rows, time = [r for r in results.rounds if r.start == start.number], start.time
        kept = [r for r in rows if r.kept]
        if not kept:
            continue
        chunks = {start.defined[str(r.setting)].chunk for r in rows if str(r.setting) in start.defined}
        warm_s = max(time.load_s - sum(r.load_s for r in rows), 0.0)
        starts.append(time.engine_start_s + time.stop_s)
        warm_ups.append(warm_s / max(len(chunks), 1))
        rounds.append(max(time.total_s - starts[-1] - warm_s, 0.0) / len(kept))
    if not rounds:
        return None
    return Pace(median(starts), median(rounds), median(warm_ups), source, _MEASURED_RANGE)


def history(out: Path, profile: Profile, fingerprint: Fingerprint) -> Pace | None:
    """From the latest other study below `out` of the same load, model and engine; None where there is none."""
    wanted = workload_sha256(profile.workload)
    files = sorted(out.glob("*/study.json"), key=lambda f: f.stat().st_mtime, reverse=True) if out.is_dir() else []
    for file in files[:_STUDIES_READ]:
        try:
            store = Store(file.parent)
            study = store.study()
            alike = study.workload_sha256 == wanted and study.fingerprint.model == fingerprint.model
            if alike and study.fingerprint.engine == fingerprint.engine:
                pace = measured(store.results(), f"as in study {study.study}")
                if pace is not None:
                    return pace
        except (ChunktuneError, OSError):
            continue
    return None


def _assumed_round_s(profile: Profile) -> float:
    """Answers one token after another, or prompts at a steady rate: whichever takes longer."""
    load = profile.workload
    if load.rate is not None:
        return load.requests / load.rate
    if isinstance(load, SharedPrefixWorkload):
        parts = [(1.0, load.user_prompt_tokens, load.output_tokens)]
    elif isinstance(load, MixedWorkload):
        sharing = [c for c in load.classes if not c.own_arrivals]
        parts = [(c.weight, c.user_prompt_tokens, c.output_tokens) for c in sharing]
    else:
        return _UNKNOWN_ROUND_S
    whole = sum(weight for weight, _, _ in parts)
    prompt = sum(weight * sum(tokens) / 2 for weight, tokens, _ in parts) / whole
    output = sum(weight * sum(tokens) / 2 for weight, _, tokens in parts) / whole
    requests = load.requests + load.peak_concurrency
    decoding_s = requests / load.peak_concurrency * output * _TOKEN_S
    return max(decoding_s, requests * prompt / _PREFILL_TOKENS_S)
