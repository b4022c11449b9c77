"""The search design: which start and which round come next, until the finals are through. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean

import numpy as np

from tuner.domain.experiment import STOCK_ID, Purpose, Results, Round, SettingId, SettingState, Start
from tuner.experiment.design import Named, StartPlan, Step, StudyStopped
from tuner.freeze.document import frozen_args
from tuner.study.estimate import Evidence, Known
from tuner.study.finals import MOST_CYCLES, STARTS, challengers, completed_finals, cycles_wanted, still_in_question
from tuner.study.ledger import MOST_REPEATS, explained, given_up, group_of, read_failures
from tuner.study.problem import Problem, Registry
from tuner.study.race import Race
from tuner.study.search import GroupSearch
from tuner.study.verdict import decide

MORE_ROUNDS = 0.5
"""In a final start, cycles beyond the least may take this share of the time that the start itself takes, or of a third
of the search's load where that is longer."""
MORE_SEARCH = 3.0
"""After its first stage, the search takes at most so many times as long as the starts of the finals take to start."""
States = dict[SettingId, tuple[SettingState, str]]


@dataclass(frozen=True)
class Outlook:
    """What is still to come, for the expected time."""

    starts: int
    """Further starts, most likely."""
    least_starts: int
    most_starts: int
    rounds: int
    """Further rounds, most likely."""
    least_rounds: int
    most_rounds: int
    needed_rounds: int
    """Further rounds that are measured whatever the time budget: a cycle of the search, and the finals."""
    settings: int
    """Settings in question, stock and references included."""
    cycles: int
    """Cycles of the search still to come, most likely."""


class SweepDesign:
    """`tuner.experiment.design.Design` of a sweep.

    Everything follows from the results; what is kept between calls only saves time.
    """

    def __init__(self, problem: Problem, registry: Registry) -> None:
        self._problem = problem
        self._registry = registry
        self._known: Known = {}
        self._order: tuple[tuple[int, int], list[Named]] | None = None

    def next_start(self, results: Results) -> StartPlan | None:
        """The next start, or None when the study is done. StudyStopped when it cannot go on."""
        view = self._view(results)
        if view.failures.stopped is not None:
            raise StudyStopped(view.failures.stopped)
        plan = view.search_start() or view.final_start() or view.literal_start()
        if plan is None and results.starts and not any(r.kept for r in results.rounds):
            raise StudyStopped(explained(results.starts[-1], results))
        return plan

    def next_step(self, results: Results, start: Start) -> Step | None:
        """The next round on the running start, or None to stop the engine."""
        rows = [r for r in results.rounds if r.start == start.number]
        cycle = rows[-1].cycle if rows else results.next_cycle
        step = self._step_of(results, start, cycle)
        return step or (self._step_of(results, start, results.next_cycle) if rows else None)

    def _step_of(self, results: Results, start: Start, cycle: int) -> Step | None:
        """The first setting of the cycle that has no round in it."""
        rows = [r for r in results.rounds if r.start == start.number and r.cycle == cycle]
        order = self._cycle(results, start, cycle, rows)
        kept = {r.setting for r in rows if r.kept}
        gone = {name for at, c, name in given_up(results) if (at, c) == (start.number, cycle)} if rows else set()
        for position, named in enumerate(order):
            if named.id not in kept | gone:
                return Step(named, cycle, position)
        return None

    def _cycle(self, results: Results, start: Start, cycle: int, rows: list[Round]) -> list[Named]:
        """The settings of a cycle in their order, from what was measured before it began."""
        key = (start.number, cycle)
        if self._order is None or self._order[0] != key or not rows:
            before = Results(results.starts, results.rounds[: len(results.rounds) - len(rows)], results.elapsed_s)
            settings = self._view(before).cycle_of(start)
            random = np.random.default_rng([self._problem.seed, cycle])
            self._order = key, [settings[i] for i in random.permutation(len(settings))]
        return self._order[1]

    def left_s(self, results: Results) -> float | None:
        """What is left of the time budget; None without one."""
        return None if self._problem.time_s is None else self._problem.time_s - results.elapsed_s

    def states(self, results: Results) -> States:
        """State of every setting that was measured or refused, and why.

        A code for `infeasible` and `failed`, the sentence that says by what for `eliminated`, '' for `measured`.
        """
        return self._view(results).states()

    def outlook(self, results: Results) -> Outlook:
        """What is still to come."""
        return self._view(results).outlook()

    def _view(self, results: Results) -> _View:
        return _View(self._problem, self._registry, results, self._known)


class _View:
    """A study as its results leave it."""

    def __init__(self, problem: Problem, registry: Registry, results: Results, known: Known) -> None:
        self.problem = problem
        self.registry = registry
        self.results = results
        self.known = known
        self.failures = read_failures(results)
        self.searches = [
            GroupSearch(problem, group, registry, results, failures=self.failures, known=known)
            for group in problem.groups
        ]

    # --- the search ---

    def search_start(self) -> StartPlan | None:
        if self._begun("final"):
            return None
        for search in self.searches:
            if self.problem.live:
                over = self._out_of_time() or self._searched_enough(search)
                settings = [] if over else search.next_cycle()
                if settings:
                    label = ", ".join(["search", *_boot_words(search)])
                    return self._live("search", label, search, settings)
            elif not self._out_of_time() and (named := search.next_single()) is not None:
                return self._single("search", named.setting.label, named)
        return None

    def _begun(self, purpose: Purpose) -> bool:
        return any(s.purpose == purpose for s in self.results.starts)

    def _live(self, purpose: Purpose, label: str, search: GroupSearch, settings: Sequence[Named]) -> StartPlan:
        return StartPlan(
            purpose=purpose,
            label=label,
            engine_args=search.boot_args(),
            settings=tuple(settings),
            live=True,
            live_budget=any(n.setting.reuse_budget is not None for n in [*settings, *search.candidates]),
        )

    def _single(self, purpose: Purpose, label: str, named: Named) -> StartPlan:
        return StartPlan(
            purpose=purpose,
            label=label,
            engine_args=named.setting.engine_args(self.problem.base_args),
            settings=(named,),
            live=False,
            reuse_budget=named.setting.reuse_budget,
        )

    # --- the finals ---

    @cached_property
    def _chosen(self) -> list[list[Named]]:
        """By group: its challengers, and stock where it belongs; empty where a group is out of question.

        Finals under way go on with the settings that they began with, without those that failed since.
        """
        found = [challengers(search) for search in self.searches]
        starts = [number for search in self.searches for number in search.starts]
        keep = [True] if len(found) == 1 else still_in_question(self.problem, self.results, found, starts)
        chosen = []
        for search, group, kept in zip(self.searches, found, keep, strict=True):
            stock = [search.anchor] if search.anchor.id == STOCK_ID else []
            stock = [n for n in stock if n.id not in search.out and n.id in search.evidence.ids]
            begun = self._begun_with(search) if self.problem.live else []
            chosen.append(begun or [*(group if kept else []), *stock])
        return chosen

    def _begun_with(self, search: GroupSearch) -> list[Named]:
        mine = [s for s in self.results.starts if s.purpose == "final" and group_of(self.problem, s) == search.group]
        named = {n: Named(n, s.defined[str(n)]) for s in mine for n in s.settings}
        return [n for n in named.values() if n.id not in self.failures.out]

    def _final_sets(self) -> list[tuple[GroupSearch, list[Named]]]:
        """What a final start measures: a group's settings together, or one setting where nothing is switched."""
        sets = []
        for search, chosen in zip(self.searches, self._chosen, strict=True):
            parts = [chosen] if self.problem.live else [[named] for named in chosen]
            sets += [(search, part) for part in parts if part]
        return sets

    def final_start(self) -> StartPlan | None:
        if not any(s.purpose == "search" for s in self.results.starts) or not self._worth_finals():
            return None
        sets = self._final_sets()
        done = [[s for s in completed_finals(self.results) if self._is_of(s, *one)] for one in sets]
        for turn in range(STARTS):
            random = np.random.default_rng([self.problem.seed, turn, 1])
            for i in random.permutation(len(sets)):
                if len(done[i]) <= turn:
                    search, part = sets[i]
                    label = f"final {turn + 1} of {STARTS}"
                    if self.problem.live:
                        return self._live("final", ", ".join([label, *_boot_words(search)]), search, part)
                    return self._single("final", f"{label}, {part[0].setting.label}", part[0])
        return None

    def _worth_finals(self) -> bool:
        """Whether anything that was measured has a value of the objective and may meet the limits."""
        return any(self._chosen) and any(search.standings for search in self.searches)

    def _is_of(self, start: Start, search: GroupSearch, part: Sequence[Named]) -> bool:
        if start.live:
            return group_of(self.problem, start) == search.group
        return part[0].id in start.settings

    # --- the start with the frozen command ---

    def literal_start(self) -> StartPlan | None:
        """One start of what is going to be frozen, as its command says it; not where each start was that already."""
        if not self.problem.live or not completed_finals(self.results):
            return None
        decision = decide(self.problem, self.results, self.registry)
        name, setting = decision.winner, decision.setting
        if name is None or setting is None:
            return None
        done = [s for s in self.results.starts if s.purpose == "literal" and name in s.settings]
        if any(s.state == "completed" for s in done):
            return None
        final = next(s for s in completed_finals(self.results) if name in s.settings)
        plan = self._single("literal", "literal", Named(name, setting))
        return replace(plan, engine_args=frozen_args(setting, self.problem.base_args, final))

    # --- cycles ---

    def cycle_of(self, start: Start) -> list[Named]:
        """The settings of the next cycle of a start, in no order; none when the start is through."""
        cycles = len({r.cycle for r in self.results.rounds if r.start == start.number})
        mine = [Named(n, start.defined[str(n)]) for n in start.settings if n not in self.failures.out]
        if start.purpose == "literal" or not start.live:
            return mine if cycles < self.problem.rounds else []
        if start.purpose == "search":
            search = next((s for s in self.searches if s.group == group_of(self.problem, start)), None)
            if search is None or not search.fits(start):
                return []
            return [] if self._out_of_time() or self._searched_enough(search) else search.next_cycle()
        return mine if cycles < self._final_cycles(mine, start) else []

    def _final_cycles(self, names: Sequence[Named], start: Start) -> int:
        starts = [number for search in self.searches for number in search.starts]
        evidence = Evidence(self.problem, self.results, starts, known=self.known)
        wanted = cycles_wanted(self.problem, evidence, [n.id for n in names])
        cycle_s = len(names) * self._round_s
        if not cycle_s:
            return wanted
        least, limit_s = self.problem.rounds, self.problem.time_s
        searched = set(self.results.numbers("search"))
        searched_s = sum(r.load_s for r in self.results.rounds if r.start in searched)
        most = least + math.floor(MORE_ROUNDS * max(self._start_s, searched_s / STARTS) / cycle_s)
        if limit_s is not None:
            spent_s = sum(r.load_s for r in self.results.rounds if r.start == start.number)
            others = max(0, self._starts_left - 1)
            left_s = limit_s - self.results.elapsed_s + spent_s - others * self._start_s
            # The start with the frozen command takes a share as the others do.
            most = min(most, math.floor(left_s / (others + 1) / cycle_s))
        return max(least, min(wanted, most))

    # --- time ---

    @cached_property
    def _start_s(self) -> float:
        """What a start takes beside its load, as measured."""
        found = [s.start_s + s.time.stop_s for s in self.results.starts if s.start_s > 0]
        return mean(found) if found else 0.0

    @cached_property
    def _round_s(self) -> float:
        found = [r.load_s for r in self.results.rounds if r.load_s > 0]
        return mean(found) if found else 0.0

    @property
    def _starts_left(self) -> int:
        """Starts of the finals and with the frozen command that are not through, as far as that is known."""
        starts = STARTS * (len(self.searches) if self.problem.live else 3) + self.problem.live
        done = len(completed_finals(self.results)) + any(s.purpose == "literal" for s in self.results.starts)
        return max(0, starts - done)

    def _searched_enough(self, search: GroupSearch) -> bool:
        """Whether what a group measured after its first stage took as long as it may, against the starts to come."""
        cycles: dict[int, set[int]] = {start: set() for start in search.starts}
        spent_s = 0.0
        for r in self.results.rounds:
            if r.start in cycles:
                cycles[r.start].add(r.cycle)
                spent_s += r.load_s if len(cycles[r.start]) > self.problem.rounds else 0.0
        return spent_s > MORE_SEARCH * STARTS * self._start_s > 0

    def _out_of_time(self) -> bool:
        """Whether another cycle of the search would take the time that the finals need."""
        if not self.results.rounds:
            return False
        limit = self.problem.time_s
        if limit is None:
            return False
        each = self._start_s + self._round_s * self.problem.rounds * (5 if self.problem.live else 1)
        last = self.results.rounds[-1]
        next_s = self._round_s * sum((r.start, r.cycle) == (last.start, last.cycle) for r in self.results.rounds)
        return self.results.elapsed_s + next_s + self._starts_left * each > limit

    # --- what people are told ---

    def states(self) -> States:
        found: States = {}
        for setting, code, _ in self.problem.infeasible:
            found[self.registry.id_of(setting)] = ("infeasible", code)
        for search in self.searches:
            race = search.race if self.problem.live else Race()
            for name in search.evidence.ids:
                why = race.dropped.get(name)
                found[name] = ("measured", "") if why is None else ("eliminated", why)
            found |= search.out
        finalists = {n for s in self.results.starts if s.purpose == "final" for n in s.settings}
        for name in finalists:
            if found.get(name, ("eliminated", ""))[0] == "eliminated":
                found[name] = ("measured", "")
        return found

    def outlook(self) -> Outlook:
        """Guesses: half as much again for stages after the first, and a few refined chunk sizes."""
        if self._begun("final") or self._out_of_time() or not self._more_to_search():
            return self._with_finals((0, 0, 0), (0, 0, 0), 0)
        rounds, live = self.problem.rounds, self.problem.live
        settings = waiting = 0
        for search in self.searches:
            names = [n.id for n in search.candidates if n.id not in search.out]
            settings += 1 + len(search.references) + len(search.race.in_question(names) if live else names)
            waiting += sum(n not in search.evidence.ids for n in [*names, search.anchor.id])
        if live:
            groups = len(self.searches)
            least = settings * rounds
            spread = least, least + settings * rounds // 2 + 8 * rounds * groups, (4 * settings + 32 * groups) * rounds
            return self._with_finals((groups, groups, groups), spread, settings)
        more = 8 if self.problem.refine else 0
        starts = waiting, waiting + more // 4, waiting + more
        return self._with_finals(starts, (starts[0] * rounds, starts[1] * rounds, starts[2] * rounds), settings)

    def _more_to_search(self) -> bool:
        if not self.problem.live:
            return any(s.next_single() is not None for s in self.searches)
        return any(s.next_cycle() for s in self.searches)

    def _with_finals(self, starts: tuple[int, int, int], searched: tuple[int, int, int], settings: int) -> Outlook:
        """Least, most likely and most starts and rounds of the search, with the finals and the literal start."""
        rounds, live = self.problem.rounds, self.problem.live
        begun = self._begun("final")
        sets = len(self._final_sets()) if begun else len(self.searches) if live else 3
        finals = max(0, sets * STARTS - len(completed_finals(self.results)))
        literal = int(live and not any(s.purpose == "literal" and s.state == "completed" for s in self.results.starts))
        # A live final start measures two or three challengers and stock.
        least, likely, most = (3 * rounds, 6 * rounds, 4 * MOST_CYCLES) if live else (rounds, rounds, rounds)
        fixed, more = literal * rounds, finals + literal
        repeats = MOST_REPEATS if starts[2] + more else 0
        return Outlook(
            starts=starts[1] + more,
            least_starts=starts[0] + more,
            most_starts=starts[2] + more + repeats,
            rounds=searched[1] + finals * likely + fixed,
            least_rounds=searched[0] + finals * least + fixed,
            most_rounds=searched[2] + finals * most + fixed,
            needed_rounds=settings + finals * least + fixed,
            settings=settings,
            cycles=searched[1] // settings if settings and live else 0,
        )


def _boot_words(search: GroupSearch) -> list[str]:
    return [f"{name} {value}" for name, value in search.group.boot.items()]
