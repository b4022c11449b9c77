"""The finals: which settings meet once more on fresh starts, in which order, and for how many cycles. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from tuner.domain.experiment import STOCK_ID, Results, SettingId, Start
from tuner.experiment.design import Named
from tuner.study.estimate import Evidence, rank
from tuner.study.problem import Problem
from tuner.study.race import ZONE, Standing
from tuner.study.search import GroupSearch

STARTS = 3
"""Fresh starts of each group."""
MOST_CYCLES = 20
"""In one final start."""
ROUNDS_ERROR = 0.01
"""Standard error that the noise of rounds may leave in the contrast with stock over all finals, where the search shows
a small difference; of a large one, a sixth."""
CHOICE_ERROR = 0.02
"""The same for the contrasts among the settings that may be frozen."""
BANDS = (1.01, 0.98, 0.95, 0.85, 0.6, 0.4)
"""Probabilities of meeting every limit, from sure to likely. A little below the targets of the refinement, which the
settings refined for them meet only about."""
POSSIBLE = 0.1
"""A setting, or a group, that is the best with a smaller probability is left out."""


def completed_finals(results: Results) -> list[Start]:
    """Final starts that count: whole ones."""
    with_rounds = {r.start for r in results.rounds if r.kept}
    return [s for s in results.starts if s.purpose == "final" and s.state == "completed" and s.number in with_rounds]


def challengers(search: GroupSearch) -> list[Named]:
    """The settings of a group that go to the finals beside stock, best first; none when none may meet the limits.

    Where no limit binds: the best and the runner-up. Where one does: the best of each of `BANDS`, unless a safer one
    is clearly better, since the level of one start is uncertain by as much as starts differ, and after the finals
    one of them should be the best that passes. A setting with a reuse budget brings its counterpart without one
    along, where that was measured.
    """
    named = {n.id: n for n in search.candidates if n.id not in search.out}
    order = _by_cost([s for s in search.standings.values() if s.id in named and s.p >= POSSIBLE])
    chosen: list[Standing] = []
    for low, high in pairwise([*BANDS, 0.0]):
        best = next((s for s in order if high <= s.p < low), None)
        if best is not None and all(best.costs[0] < s.costs[0] + ZONE for s in chosen):
            # What may not meet the limits at all goes only where nothing else does.
            chosen += [best] if high or not chosen else []
    chosen.sort(key=order.index)
    names = [s.id for s in chosen]
    names += [n.id for n in named.values() if names and _is_plain_twin(search, n, named[names[0]])]
    names = [name for name in dict.fromkeys(names) if name in search.evidence.ids]
    if len(names) == 1:
        names += [s.id for s in order if s.p >= BANDS[-1] and s.id not in names][:1]
    return [named[name] for name in names]


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

    Fixed before the finals begin, since a number of cycles that depended on their results would bias them. Against a
    stock that may be kept, a small gain has to be told from none; among the others the best has to be found.
    """
    path = problem.objective.metrics[0]
    others = [n for n in names if n != STOCK_ID]
    pairs = [(n, others[0], CHOICE_ERROR) for n in others[1:]]
    if evidence.p_feasible(STOCK_ID) >= POSSIBLE:
        pairs += [(n, STOCK_ID, ROUNDS_ERROR) for n in others]
    wanted = []
    for one, other, least in pairs:
        gains, variance = evidence.gains(one, other), evidence.paired_variance(one, other, path)
        if gains is None or variance is None or (other == STOCK_ID and gains[0].value <= 0):
            continue
        error = max(least, abs(gains[0].value) / 6)
        wanted.append(math.ceil(variance / (STARTS * error**2)))
    return max(problem.rounds, min(MOST_CYCLES, max(wanted, default=0)))
