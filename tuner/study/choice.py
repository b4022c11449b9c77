"""Which trials go to the finals, and which one wins. Pure: trials in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tuner.domain.candidate import Candidate
from tuner.domain.measurement import metric
from tuner.domain.outcome import Trial
from tuner.domain.profile import Objective

FINALISTS = 2


def values(trial: Trial, objective: Objective) -> list[float] | None:
    """The objective's values, None when one was not measured or is not finite."""
    if trial.median is None:
        return None
    found = [metric(trial.median, path) for path in objective.metrics]
    return [v for v in found if v is not None] if all(v is not None and math.isfinite(v) for v in found) else None


def feasible(trial: Trial, objective: Objective) -> bool:
    """Completed, every objective measured, every constraint holding."""
    return trial.state == "completed" and not trial.violations and values(trial, objective) is not None


def ranked(trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Feasible trials, best first.

    With two objectives: by the distance to the ideal point, each objective scaled to its span over the
    feasible trials, so that the first is always on the Pareto front.
    """
    pool = [t for t in trials if feasible(t, objective)]
    if not pool:
        return []
    signs = [1.0 if direction == "minimize" else -1.0 for direction in objective.directions]
    costs = {t.number: [s * v for s, v in zip(signs, values(t, objective) or [], strict=True)] for t in pool}
    lows = [min(c[i] for c in costs.values()) for i in range(len(signs))]
    spans = [max(c[i] for c in costs.values()) - lows[i] or 1.0 for i in range(len(signs))]

    def distance(trial: Trial) -> tuple[float, int]:
        scaled = [(c - low) / span for c, low, span in zip(costs[trial.number], lows, spans, strict=True)]
        return math.hypot(*scaled), trial.number

    return sorted(pool, key=distance)


def pareto_front(trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Feasible trials that no other beats in every objective."""
    pool = [t for t in trials if feasible(t, objective)]
    signs = [1.0 if direction == "minimize" else -1.0 for direction in objective.directions]

    def cost(trial: Trial) -> list[float]:
        return [s * v for s, v in zip(signs, values(trial, objective) or [], strict=True)]

    def beaten(trial: Trial) -> bool:
        mine = cost(trial)
        return any(
            all(o <= m for o, m in zip(cost(other), mine, strict=True)) and cost(other) != mine for other in pool
        )

    return [t for t in pool if not beaten(t)]


def candidate_of(trial: Trial) -> Candidate:
    """The configuration that a trial measured."""
    return Candidate(knobs=trial.knobs, reuse_budget=trial.reuse_budget)


def without_plugin(candidate: Candidate) -> Candidate:
    """The same configuration on the stock scheduler."""
    return Candidate(knobs=candidate.knobs)


def finalists(candidates: Sequence[Trial], objective: Objective) -> list[Trial]:
    """The trials whose configurations are measured once more, best first."""
    return ranked(candidates, objective)[:FINALISTS]


def winner(
    finals: Sequence[Trial],
    objective: Objective,
    *,
    beats: Callable[[Trial, Trial], bool],
) -> Trial | None:
    """The best of the (merged) finals; None when none is feasible.

    A configuration with the scheduler plug-in has to beat the best one without it beyond the noise
    (`beats(plugin, plain)`): a plug-in that brings nothing is a dependency that nobody needs.
    """
    order = ranked(finals, objective)
    plain = next((t for t in order if t.reuse_budget is None), None)
    return next((t for t in order if plain is None or t is plain or beats(t, plain)), None)
