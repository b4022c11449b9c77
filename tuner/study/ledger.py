"""What starts that failed say: which settings are out, and when the study cannot go on. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tuner.domain.experiment import Results, SettingId, SettingState, Start
from tuner.domain.setting import CHUNK_KNOB, Scalar
from tuner.engine.policy import policy
from tuner.experiment.design import SWITCH_REFUSED
from tuner.study.problem import Group, Problem

MOST_REPEATS = 3
"""Starts of a study that are made again because the engine or its surroundings failed."""
TIMEOUT_REPEATS = 1
"""Of these, repeats in a row of a start that was not ready in time: each of them costs the whole timeout."""
CRASHES = 2
"""A setting under which the engine failed so often is left out."""
GIVEN_UP = 2
"""A setting of which no round counted in so many cycles is left out."""
_FAILED = ("engine_failed", "load_failed")

Out = dict[SettingId, tuple[SettingState, str]]
"""Settings that are measured no more: `infeasible` or `failed`, and the cause code."""


def group_of(problem: Problem, start: Start) -> Group | None:
    """The group that a live start was made for."""
    asked = {k: v for k, v in start.engine_args.items() if k != CHUNK_KNOB}
    base = {k: v for k, v in problem.base_args.items() if k != CHUNK_KNOB}
    return next((g for g in problem.groups if {**base, **g.boot} == asked), None)


def given_up(results: Results) -> set[tuple[int, int, SettingId]]:
    """(start, cycle, setting) of which every round was discarded: the runner has tried more than once."""
    kept = {(r.start, r.cycle, r.setting) for r in results.rounds if r.kept}
    return {key for r in results.rounds if (key := (r.start, r.cycle, r.setting)) not in kept}


@dataclass
class Failures:
    """What the failures so far amount to."""

    out: Out = field(default_factory=dict)
    repeats: int = 0
    """Starts that were made again."""
    stopped: Start | None = None
    """The start after which the study cannot go on: no other start can help, or too many were repeated."""


def read_failures(results: Results) -> Failures:
    """Go through the starts in their order."""
    found = Failures(_discarded(results))
    crashes: Counter[SettingId] = Counter()
    in_a_row = 0
    for start in results.starts:
        rounds = [r.kept for r in results.rounds if r.start == start.number]
        measures_one = not start.live and len(start.settings) == 1 and start.purpose != "literal"
        if start.state == "infeasible" and measures_one:
            found.out[start.settings[0]] = ("infeasible", start.cause or "unknown")
        if start.state not in _FAILED and (start.state != "completed" or any(rounds) or not rounds):
            in_a_row = 0 if start.state == "completed" else in_a_row
            continue
        name = start.failed_setting
        crashes.update([] if name is None else [name])
        in_a_row = 0 if any(rounds) else in_a_row + 1
        to_blame = name is not None and (crashes[name] >= CRASHES or found.repeats >= MOST_REPEATS)
        most = TIMEOUT_REPEATS if start.cause == "startup_timeout" else MOST_REPEATS
        if policy(start.cause or "unknown") == "fatal" or in_a_row > most:
            found.stopped = explained(start, results)
        elif to_blame and name is not None:
            found.out[name] = ("failed", start.cause or "unknown")
        elif found.repeats >= MOST_REPEATS:
            found.stopped = explained(start, results)
        else:
            found.repeats += 1
    return found


def _discarded(results: Results) -> Out:
    """Settings that the running engine refused, or of which no round ever counted."""
    out: Out = {}
    kept = {r.setting for r in results.rounds if r.kept}
    last = {(r.start, r.cycle, r.setting): r for r in results.rounds if not r.kept}
    lost = Counter(row.setting for row in last.values())
    for row in last.values():
        if row.code == SWITCH_REFUSED and row.setting not in kept:
            out[row.setting] = ("infeasible", SWITCH_REFUSED)
        elif row.setting not in kept and lost[row.setting] >= GIVEN_UP:
            out.setdefault(row.setting, ("failed", row.code or "unknown"))
    return out


def explained(start: Start, results: Results) -> Start:
    """The start with a reason: that of its last discarded round where it has none of its own."""
    row = next((r for r in reversed(results.rounds) if r.start == start.number and not r.kept), None)
    if start.message or row is None:
        return start
    return start.model_copy(update={"cause": row.code, "message": row.reason})


def failed_boots(problem: Problem, group: Group, results: Results) -> dict[int, str]:
    """Chunk sizes with which live starts of the group could not boot, and why; a code each."""
    found = {}
    for start in results.starts:
        if start.live and start.state == "infeasible" and group_of(problem, start) == group:
            chunk = _chunk(start.engine_args.get(CHUNK_KNOB)) or stock_chunk(problem, group, results)
            if chunk is not None:
                found[chunk] = start.cause or "unknown"
    return found


def smallest_chunk(problem: Problem, group: Group, results: Results) -> tuple[int, str]:
    """The smallest chunk size that refusals named, with the cause; (0, '') where none did."""
    bounds = [
        (s.bound, s.cause or "unknown") for s in results.starts if s.bound is not None and group_of(problem, s) == group
    ]
    return max(bounds, default=(0, ""))


def stock_chunk(problem: Problem, group: Group, results: Results) -> int | None:
    """The chunk size of the group without a chunk knob: said by its last start, else as expected."""
    own = _chunk(problem.base_args.get(CHUNK_KNOB))
    if own is not None:
        return own
    said = [s.stock_chunk for s in results.starts if s.stock_chunk is not None and group_of(problem, s) == group]
    return said[-1] if said else problem.default_chunk


def booted_chunk(start: Start) -> int | None:
    """The largest chunk size that settings of a live start can have; None where it did not say."""
    return _chunk((start.effective_args or {}).get(CHUNK_KNOB)) or _chunk(start.engine_args.get(CHUNK_KNOB))


def _chunk(value: Scalar) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
