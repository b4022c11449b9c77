"""What the search of one group measures next: its list, what a sampler proposes, and refined chunk sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from tuner.domain.experiment import STOCK_ID, Purpose, Results, SettingId, Start
from tuner.domain.setting import CHUNK_KNOB, Scalar, Setting
from tuner.experiment.design import Named
from tuner.space.knobs import is_live
from tuner.study.estimate import Evidence, Known
from tuner.study.ledger import (
    Failures,
    Out,
    booted_chunk,
    failed_boots,
    group_of,
    read_failures,
    smallest_chunk,
    stock_chunk,
)
from tuner.study.problem import Group, Problem, Registry
from tuner.study.race import LIKELY, Race, Standing, run_race, standings
from tuner.study.refine import Point, new_chunks
from tuner.study.settings import SettingRules

FIRST = 12
"""Settings of the first cycles where the list is longer than the budget, or where there is none."""
BATCH = 6
"""Settings that a sampler proposes at a time."""
FEW = 3
"""With so many settings left in question, others join: they need not wait until the race is decided."""
KEPT_FOR_REFINING = 8
"""Of the most settings that are measured: so many are left for refined chunk sizes."""


class GroupSearch:
    """The search of one group, as the results so far leave it."""

    def __init__(
        self,
        problem: Problem,
        group: Group,
        registry: Registry,
        results: Results,
        *,
        failures: Failures | None = None,
        known: Known | None = None,
        purposes: tuple[Purpose, ...] = ("search",),
    ) -> None:
        """`purposes` are those of the starts that count."""
        self.problem = problem
        self._most = max(1, problem.max_settings // len(problem.groups))
        self._purposes = purposes
        self.group = group
        self._registry = registry
        self._results = results
        self._known = known
        self._failures = failures or read_failures(results)
        self.stock_chunk = stock_chunk(problem, group, results)
        self._rules = SettingRules(problem.base_args, self.stock_chunk)
        anchor = problem.stock if not group.boot else Setting(knobs=group.boot)
        self.anchor = self._named(anchor)
        self.references = [self._named(s) for s in problem.references] if not group.boot else []

    def _named(self, setting: Setting) -> Named:
        return Named(self._registry.id_of(setting), setting)

    def key(self, setting: Setting) -> str:
        """Equal for settings with the same effect, once stock's chunk size is known."""
        reduced, chunk = self._rules.reduced(setting), self._rules.chunk(setting)
        return reduced.model_copy(update={"knobs": {**reduced.knobs, CHUNK_KNOB: chunk}}).key

    # --- what there is ---

    @cached_property
    def starts(self) -> list[int]:
        """Numbers of the starts whose rounds count: those that failed too, for pairs within them."""
        found = []
        for start in self._results.starts:
            mine = group_of(self.problem, start) == self.group if start.live else self._holds(start)
            if start.purpose in self._purposes and start.state != "infeasible" and mine:
                found.append(start.number)
        return found

    def _holds(self, start: Start) -> bool:
        """Whether a start that measured one setting measured one of this group."""
        return any(boot_of(s) == self.group.boot for s in start.defined.values())

    @cached_property
    def evidence(self) -> Evidence:
        return Evidence(self.problem, self._results, self.starts, known=self._known)

    @cached_property
    def candidates(self) -> list[Named]:
        """Every setting of the search that may win, stock aside: the list, and what joined it."""
        listed = list(self.group.settings)
        if len(listed) > self._most:
            listed = [listed[round(i * (len(listed) - 1) / (FIRST - 1))] for i in range(FIRST)]
        if self.group.boot:
            listed.insert(0, self.anchor.setting)
        references = {r.id for r in self.references}
        joined = [s for _, s in self._results.settings() if boot_of(s) == self.group.boot and not s.is_stock]
        found: dict[str, Named] = {}
        seen = set() if self.group.boot else {self.key(self.problem.stock)}
        for setting in [*listed, *joined]:
            key = self.key(setting)
            if key not in seen:
                seen.add(key)
                found[key] = self._named(setting)
        return [named for named in found.values() if named.id not in references][: self._most]

    @cached_property
    def standings(self) -> dict[SettingId, Standing]:
        chunks = {}
        for named in [self.anchor, *self.candidates]:
            knobs = {name: value for name, value in named.setting.knobs.items() if name != CHUNK_KNOB}
            chunk = self._rules.chunk(named.setting)
            if chunk is not None:
                chunks[named.id] = (named.setting.model_copy(update={"knobs": knobs}).key, chunk)
        return standings(self.evidence, chunks)

    @cached_property
    def out(self) -> Out:
        """Settings that cannot be measured, or not any more."""
        boots = failed_boots(self.problem, self.group, self._results)
        least, why = smallest_chunk(self.problem, self.group, self._results)
        most = self._most_chunk
        out: Out = {}
        for named in [self.anchor, *self.references, *self.candidates]:
            chunk = self._rules.chunk(named.setting)
            if chunk is None:
                continue
            if boots and chunk >= min(boots):
                out[named.id] = ("infeasible", boots[min(boots)])
            elif chunk < least:
                out[named.id] = ("infeasible", why)
            elif most is not None and chunk > most:
                out[named.id] = ("infeasible", "not_as_asked")
        return out | self._failures.out

    @cached_property
    def _most_chunk(self) -> int | None:
        """The chunk size of an engine that was asked for a larger one and did not take it."""
        found = []
        for start in self._results.starts:
            asked, took = start.engine_args.get(CHUNK_KNOB), booted_chunk(start)
            mine = start.live and group_of(self.problem, start) == self.group
            if mine and isinstance(asked, int) and took is not None and took < asked:
                found.append(took)
        return min(found, default=None)

    def _usable(self, named: list[Named]) -> list[Named]:
        return [n for n in named if n.id not in self.out]

    # --- starts ---

    @property
    def _largest(self) -> int | None:
        """The largest chunk size under test."""
        wanted = [self._rules.chunk(n.setting) for n in self._usable([self.anchor, *self.references, *self.candidates])]
        return max((c for c in wanted if c is not None), default=None)

    def boot_args(self) -> dict[str, Scalar]:
        """Options of a live start: the largest chunk under test, without the option where that is stock's own."""
        args = {**self.problem.base_args, **self.group.boot}
        largest = self._largest
        if largest is not None and largest != self.stock_chunk:
            args[CHUNK_KNOB] = largest
        return args

    def fits(self, start: Start) -> bool:
        """Whether everything under test can be measured on a live start that is ready."""
        booted, largest = booted_chunk(start), self._largest
        return booted is None or largest is None or largest <= booted

    # --- the next settings ---

    @cached_property
    def race(self) -> Race:
        labels = {n.id: n.setting.label for n in [self.anchor, *self.candidates]}
        return run_race(self.evidence, [n.id for n in self._usable(self.candidates)], self.anchor.id, labels)

    def next_cycle(self) -> list[Named]:
        """The settings of the next cycle of a live start; none when the search is over."""
        usable = self._usable(self.candidates)
        question = self.race.in_question([n.id for n in usable])
        more = list(self.further()) if len(question) <= FEW else []
        chosen = [n for n in usable if n.id in question or (more and n.id == self.race.leader)] + more
        cycles = {n.id: len(self.evidence.rounds(n.id)) for n in self.references}
        chosen += [n for n in self._usable(self.references) if cycles[n.id] < self.problem.rounds]
        if not chosen:
            return []
        anchor = [n for n in self._usable([self.anchor]) if n.id not in {c.id for c in chosen}]
        return [*anchor, *chosen]

    def next_single(self) -> Named | None:
        """The next setting to measure where each start measures one."""
        everything = self._usable([self.anchor, *self.candidates, *self.references])
        waiting = [n for n in {n.id: n for n in everything}.values() if n.id not in self.evidence.ids]
        return waiting[0] if waiting else next(iter(self.further()), None)

    def further(self) -> Iterator[Named]:
        """Settings that join once the others are through: what a sampler proposes, then refined chunk sizes."""
        room = self._most - len(self.candidates)
        if room <= 0:
            return
        proposed = list(self._proposed(min(BATCH, room - KEPT_FOR_REFINING)))
        yield from proposed or self._refined(room)

    def _proposed(self, count: int) -> Iterator[Named]:
        listed = len(self.group.settings)
        if 0 < listed <= self._most:
            return
        count = max(count, 0) if self.candidates else FIRST
        yield from (self._named(setting) for setting in self._registry.propose(self.group, count))

    def _refined(self, room: int) -> Iterator[Named]:
        leader = self._leader
        if not self.problem.refine or leader is None:
            return
        family = self.family(leader)
        for chunk in new_chunks(self.evidence, leader.id, family, self.problem.chunk_unit)[:room]:
            setting = self._at_chunk(leader.setting, chunk)
            if self._rules.refusal(setting) is None:
                yield self._named(setting)

    @property
    def _leader(self) -> Named | None:
        """The setting to refine around; None where nothing can be better than stock by enough."""
        if not self.problem.live:
            ranked = [n for n in self._ranked_singles() if n.id != STOCK_ID]
            return ranked[0] if ranked else None
        race = self.race
        return next((n for n in self.candidates if n.id == race.leader and n.id not in race.dropped), None)

    def _ranked_singles(self) -> list[Named]:
        found = self.standings
        likely = [s for s in found.values() if s.p >= LIKELY] or list(found.values())
        order = [s.id for s in sorted(likely, key=lambda s: s.costs)]
        by_id = {n.id: n for n in [self.anchor, *self.candidates]}
        return [by_id[name] for name in order if name in by_id]

    def family(self, leader: Named) -> list[Point]:
        """Measured settings that differ from the leader in the chunk size alone, by chunk size."""
        found = self.standings
        if leader.id not in found:
            return []
        points: dict[int, Point] = {}
        for named in [*self.candidates, self.anchor]:
            standing, chunk = found.get(named.id), self._rules.chunk(named.setting)
            if standing is None or chunk is None or chunk in points:
                continue
            if self.key(self._at_chunk(leader.setting, chunk)) == self.key(named.setting):
                cost = standing.costs[0] - found[leader.id].costs[0]
                points[chunk] = Point(named.id, chunk, cost, standing.p)
        return [points[chunk] for chunk in sorted(points)]

    def _at_chunk(self, setting: Setting, chunk: int) -> Setting:
        moved = Setting(knobs={**setting.knobs, CHUNK_KNOB: chunk}, reuse_budget=setting.reuse_budget)
        return self._rules.reduced(moved)


def boot_of(setting: Setting) -> dict[str, Scalar]:
    """The knobs of a setting that need a start of their own."""
    return {name: value for name, value in setting.knobs.items() if not is_live(name)}


def named_in(results: Results, name: SettingId, problem: Problem) -> Setting:
    """What an id stands for in the results; stock where nothing says."""
    return dict(results.settings()).get(name, problem.stock)
