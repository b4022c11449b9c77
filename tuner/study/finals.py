"""The finals: the best configurations and the baseline once more, interleaved on fresh starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.domain.setting import Setting
from tuner.domain.measurement import metric
from tuner.domain.observation import RoundObservation
from tuner.domain.experiment import Trial, TrialTime
from tuner.domain.profile import Profile
from tuner.measure import relative_change, summarize
from tuner.study.choice import FINALISTS, candidate_of, finalists, label_of, uses_plugin, without_plugin
from tuner.experiment.store import StudyDirectory, read_observation
from tuner.trial.run import violations

STARTS = 2
"""Fresh starts of each finalist: the second in reverse order, so that a drift of the machine cancels."""


@dataclass(frozen=True)
class FinalRun:
    """One engine start of the finals."""

    of: int
    """The trial whose configuration is measured again."""
    candidate: Setting
    label: str
    rounds: int


def plan_finals(baseline: Trial | None, candidates: Sequence[Trial], profile: Profile) -> list[FinalRun]:
    """The starts in order: A B S, then S B A. Empty when no candidate is feasible.

    The best candidate with the scheduler plug-in brings its twin without it along.
    """
    best = finalists(candidates, profile.objective)
    if not best:
        return []
    entries: list[tuple[int, Setting, str]] = [(t.number, candidate_of(t), t.label) for t in best]
    for trial in best:
        twin = without_plugin(candidate_of(trial))
        if uses_plugin(trial):
            measured = [entry[1] for entry in entries] + ([] if baseline is None else [candidate_of(baseline)])
            if twin not in measured:
                entries.append((trial.number, twin, label_of(twin)))
            break
    if baseline is not None and baseline.state == "completed":
        entries.append((baseline.number, candidate_of(baseline), baseline.label))
    runs: list[FinalRun] = []
    for index, rounds in enumerate(_shares(profile)):
        order = entries if index % 2 == 0 else list(reversed(entries))
        runs += [FinalRun(of, candidate, label, rounds) for of, candidate, label in order]
    return runs


def _shares(profile: Profile) -> list[int]:
    """The rounds of each start of a finalist; a single round leaves nothing for a second start."""
    first = math.ceil(profile.rounds / STARTS)
    return [first] if profile.rounds == 1 else [first, profile.rounds - first]


def starts_ahead(
    baseline: Trial | None, candidates: Sequence[Trial], done: Sequence[Trial], profile: Profile, candidates_left: int
) -> int:
    """How many starts the finals still take: exact without `candidates_left`, else as if each of them were feasible.

    `done` are the finals so far; a `baseline` of None is still to be measured.
    """
    planned = plan_finals(baseline, candidates, profile)
    more = min(FINALISTS - len(finalists(candidates, profile.objective)), candidates_left)
    comes_too = baseline is None or (baseline.state == "completed" and not planned)
    unknown = more + (1 if comes_too and (planned or more) else 0)
    return len(missing(planned, done)) + unknown * len(_shares(profile))


def missing(runs: Sequence[FinalRun], done: Sequence[Trial]) -> list[FinalRun]:
    """The starts that an earlier run of the study did not complete."""
    left = list(done)
    rest = []
    for run in runs:
        match = next((t for t in left if t.final_of == run.of and candidate_of(t) == run.candidate), None)
        if match is None:
            rest.append(run)
        else:
            left.remove(match)
    return rest


def observed(directory: StudyDirectory, trial: Trial) -> list[RoundObservation]:
    """What the rounds that count saw, read back from disk."""
    return [
        read_observation(directory.path, trial.number, number)
        for number, measurement in enumerate(trial.rounds, 1)
        if measurement.void is None
    ]


def merged(directory: StudyDirectory, trials: Sequence[Trial], profile: Profile) -> list[Trial]:
    """One trial per configuration, over the rounds of all its starts; its number is that of the first start."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.state == "completed":
            groups.setdefault(candidate_of(trial).model_dump_json(), []).append(trial)
    return [_merge(directory, group, profile) for group in groups.values()]


def _merge(directory: StudyDirectory, group: list[Trial], profile: Profile) -> Trial:
    rounds = [m for t in group for m in t.rounds if m.void is None]
    seen = [o for t in group for o in observed(directory, t)]
    summary = summarize(rounds, seen)
    return group[0].model_copy(
        update={
            "rounds": rounds,
            "median": summary.median,
            "pooled": summary.pooled,
            "ci95": summary.ci95,
            "violations": violations(summary.median, tuple(profile.constraints)),
            "warnings": list(dict.fromkeys(w for t in group for w in [*t.warnings, *summary.warnings])),
            "time": TrialTime(
                total_s=sum(t.time.total_s for t in group),
                engine_start_s=sum(t.time.engine_start_s for t in group),
                load_s=sum(t.time.load_s for t in group),
                stop_s=sum(t.time.stop_s for t in group),
            ),
        }
    )


def beats_beyond_noise(directory: StudyDirectory, profile: Profile, trials: Sequence[Trial]) -> _Beats:
    """Whether one configuration is better than another in the first objective, interval and all."""
    seen = {
        t.number: [o for s in trials if candidate_of(s) == candidate_of(t) for o in observed(directory, s)]
        for t in trials
    }
    return _Beats(profile, seen)


@dataclass(frozen=True)
class _Beats:
    profile: Profile
    seen: dict[int, list[RoundObservation]]

    def __call__(self, one: Trial, other: Trial) -> bool:
        path = self.profile.objective.metrics[0]
        if one.median is None or other.median is None or metric(one.median, path) is None:
            return False
        change = relative_change(
            other.rounds,
            one.rounds,
            path,
            baseline_observations=self.seen.get(other.number),
            now_observations=self.seen.get(one.number),
        )
        if change is None or change.ci95 is None:
            return False
        low, high = change.ci95
        return high < 0 if self.profile.objective.directions[0] == "minimize" else low > 0
