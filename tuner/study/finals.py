"""The finals: which settings meet once more on fresh starts, in which order, and for how many cycles. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tuner.domain.experiment import STOCK_ID, Results, SettingId, Start
from tuner.experiment.design import Named
from tuner.study.estimate import Evidence, rank
from tuner.study.problem import Problem
from tuner.study.race import Standing, standings
from tuner.study.refine import TARGETS
from tuner.study.search import GroupSearch

STARTS = 3
"""Fresh starts of each group."""
MOST_CYCLES = 20
"""In one final start."""
ROUNDS_ERROR = 0.01
"""Standard error that the noise of rounds may leave in the contrast with stock over all finals, where the gain is
small; of a gain that the search shows as large, a sixth."""
POSSIBLE = 0.1
"""A setting, or a group, that is the best with a smaller probability is left out."""


def completed_finals(results: Results) -> list[Start]:
    """Final starts that count: whole ones."""
    with_rounds = {r.start for r in results.rounds if r.kept}
    return [s for s in results.starts if s.purpose == "final" and s.state == "completed" and s.number in with_rounds]


def challengers(search: GroupSearch) -> list[Named]:
    """The settings of a group that go to the finals beside stock, best first; none when none may meet the limits.

    The best and the runner-up of those that meet every limit with the target probability. Where a limit binds, the
    best at a higher and at a lower probability go too: the level of one start is uncertain by as much as starts
    differ, and after the finals one of them should be the best that passes. A setting with a reuse budget brings
    its counterpart without one along, where that was measured.
    """
    named = {n.id: n for n in search.candidates if n.id not in search.out}
    found = [s for s in standings(search.evidence).values() if s.id in named]
    order = [s for s in _by_cost(found) if s.p >= POSSIBLE]
    likely_least, target, safe = TARGETS
    chosen: list[SettingId] = []
    for least in (target, likely_least, safe):
        chosen += [s.id for s in order if s.p >= least][:1]
    chosen += [s.id for s in sorted(order, key=lambda s: -s.p)][:1] if not chosen else []
    plain = next((n.id for n in named.values() if chosen and _is_plain_twin(search, n, named[chosen[0]])), None)
    chosen += [plain] if plain in {s.id for s in order} and plain is not None else []
    if len(set(chosen)) < 2:
        chosen += [s.id for s in order if s.p >= likely_least and s.id not in chosen][:1]
    return [named[name] for name in dict.fromkeys(chosen)]


def _by_cost(found: Sequence[Standing]) -> list[Standing]:
    by_id = {s.id: s for s in found}
    return [by_id[name] for name in rank({s.id: s.costs for s in found})]


def _is_plain_twin(search: GroupSearch, one: Named, other: Named) -> bool:
    """Whether `one` is `other` without its reuse budget."""
    plain = other.setting.model_copy(update={"reuse_budget": None})
    return other.setting.reuse_budget is not None and search.key(plain) == search.key(one.setting)


def still_in_question(
    problem: Problem, results: Results, chosen: Sequence[list[Named]], starts: Sequence[int]
) -> list[bool]:
    """Of each group's challengers: whether its best may be the best of all, starts differing as they do."""
    evidence = Evidence(problem, results, starts)
    leaders = [group[0].id for group in chosen if group]
    ranked = evidence.ranked(leaders)
    if not ranked:
        return [bool(group) for group in chosen]
    found = []
    for group in chosen:
        gains = evidence.gains(group[0].id, ranked[0]) if group else None
        found.append(gains is not None and (group[0].id == ranked[0] or gains[0].quantile(1 - POSSIBLE) > 0))
    return found


def cycles_wanted(problem: Problem, evidence: Evidence, names: Sequence[SettingId]) -> int:
    """Cycles of each final start, from what the search showed: so many that the noise of rounds does not decide.

    Fixed before the finals begin, since a number of cycles that depended on their results would bias them.
    """
    path = problem.objective.metrics[0]
    most = problem.rounds
    if evidence.p_feasible(STOCK_ID) < POSSIBLE:
        return most
    for name in names:
        gains, variance = evidence.gains(name, STOCK_ID), evidence.paired_variance(name, STOCK_ID, path)
        if name == STOCK_ID or not gains or variance is None or gains[0].value <= 0:
            continue
        error = max(ROUNDS_ERROR, gains[0].value / 6)
        most = max(most, math.ceil(variance / (STARTS * error**2)))
    return min(most, max(MOST_CYCLES, problem.rounds))
