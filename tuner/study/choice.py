"""Which trials go to the finals, and which one wins. Pure: trials in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tuner.domain.setting import CHUNK_KNOB, Setting
from tuner.domain.measurement import metric
from tuner.domain.experiment import Trial
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
    signs = objective.signs
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
    signs = objective.signs

    def cost(trial: Trial) -> list[float]:
        return [s * v for s, v in zip(signs, values(trial, objective) or [], strict=True)]

    def beaten(trial: Trial) -> bool:
        mine = cost(trial)
        return any(
            all(o <= m for o, m in zip(cost(other), mine, strict=True)) and cost(other) != mine for other in pool
        )

    return [t for t in pool if not beaten(t)]


def candidate_of(trial: Trial) -> Setting:
    """The configuration that a trial measured."""
    return Setting(knobs=trial.knobs, reuse_budget=trial.reuse_budget)


def uses_plugin(trial: Trial) -> bool:
    """Whether the scheduler plug-in served it: a budget with every policy off is the stock scheduler."""
    return candidate_of(trial).effective_budget is not None


def without_plugin(candidate: Setting) -> Setting:
    """The same configuration on the stock scheduler."""
    return Setting(knobs=candidate.knobs)


def finalists(candidates: Sequence[Trial], objective: Objective) -> list[Trial]:
    """The trials whose configurations are measured once more, best first."""
    return ranked(candidates, objective)[:FINALISTS]


def winner(
    finals: Sequence[Trial],
    objective: Objective,
    *,
    beats: Callable[[Trial, Trial], bool],
    stock: Trial | None = None,
) -> Trial | None:
    """The best of the (merged) finals, or `stock` where it is better than that beyond the noise; None without a final.

    A configuration with the scheduler plug-in has to beat the best one without it, stock included, beyond the noise
    (`beats(one, other)`): a plug-in that brings nothing is a dependency that nobody needs.
    """
    order = ranked(finals, objective)
    if not order:
        return None
    plain = [t for t in ranked([*finals, *([stock] if stock else [])], objective) if not uses_plugin(t)]
    with_plugin = [t for t in order if uses_plugin(t)]
    found = next((t for t in with_plugin if not plain or beats(t, plain[0])), None)
    if found is None:
        found = next((t for t in plain if t is not stock), plain[0])
        if plain[0] is stock and beats(plain[0], found):
            return stock
    return found


def label_of(candidate: Setting) -> str:
    """What people call a candidate: `chunk 512`, `chunk 512, min_reuse_ratio 0.8`."""
    parts = []
    for name, value in candidate.knobs.items():
        parts.append(f"chunk {value}" if name == CHUNK_KNOB else f"{name} {value}")
    budget = candidate.effective_budget
    if budget is not None:
        given = budget.model_dump(exclude_defaults=True)
        parts += [f"{name} {value:g}" for name, value in given.items()]
    return ", ".join(parts) or "stock"
