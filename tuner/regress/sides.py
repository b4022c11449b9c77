"""The two sides of a comparison as sessions: servers that run already, or frozen files."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tuner.clock import Clock
from tuner.domain.frozen import Frozen
from tuner.domain.setting import Scalar, Setting
from tuner.domain.workload import Workload
from tuner.errors import LoadError
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import Named, StartPlan
from tuner.experiment.events import Events
from tuner.experiment.session import OpenSession, RoundResult, Session, SessionFacts, open_server
from tuner.experiment.store import Store
from tuner.load.target import Target
from tuner.regress.compare import IDS, ComparePlan, Comparison, common_args
from tuner.regress.measure import frozen_opener, measure, notes_of, profile_of, write_result
from tuner.regress.verdict import Rules

_SERVER = "server"


def compare_servers(urls: tuple[str, str], gate: list[str], rules: Rules, *, cycles: int) -> ComparePlan:
    """Two servers, measured in turn."""
    label = " and ".join(f"{side} {url}" for side, url in zip(IDS, urls, strict=True))
    settings = tuple(Named(side, Setting(knobs={_SERVER: side})) for side in IDS)
    shared = StartPlan("compare", label, {}, settings, live=True)
    return ComparePlan(urls, gate, dataclasses.replace(rules, both_ways=True, pair_start_sd=0.0), cycles, shared=shared)


@dataclass
class Servers:
    """A session over several servers: applying a setting chooses the one that the next round goes to."""

    by_side: Mapping[str, Session]
    facts: SessionFacts = field(init=False)
    load_s: float = 0.0
    _chosen: str = ""

    def __post_init__(self) -> None:
        warnings = [f"{side}: {w}" for side, each in self.by_side.items() for w in each.facts.warnings]
        simulated = any(each.facts.simulated for each in self.by_side.values())
        self.facts = SessionFacts(simulated=simulated, warnings=warnings)

    async def apply(self, setting: Setting) -> None:
        self._chosen = str(setting.knobs[_SERVER])

    async def warm_up(self, key: str) -> None:
        """All of them: for the runner this is one start, which it warms up once."""
        for side, each in self.by_side.items():
            await each.warm_up(f"{side}/{key}")
        self._add_up()

    async def round(self, content_key: str, arrivals_key: str) -> RoundResult:
        result = await self.by_side[self._chosen].round(f"{self._chosen}/{content_key}", arrivals_key)
        self._add_up()
        return result

    def _add_up(self) -> None:
        self.load_s = sum(each.load_s for each in self.by_side.values())


def servers_opener(
    targets: Mapping[str, Target], workload: Workload, *, seed: int, clock: Clock, events: Events
) -> OpenSession:
    """Connects to the servers of all sides; LoadError names the side that cannot be used."""

    @asynccontextmanager
    async def open_session(plan: StartPlan, number: int) -> AsyncIterator[Session]:
        async with AsyncExitStack() as stack:
            opened: dict[str, Session] = {}
            for side, target in targets.items():
                server = open_server(target, workload, seed=seed, clock=clock, events=events)
                try:
                    opened[side] = await stack.enter_async_context(server)
                except LoadError as error:
                    raise LoadError(error.code, f"{side}: {error.message}", error.hint) from None
            yield Servers(opened)

    return open_session


def files_opener(
    plan: ComparePlan,
    files: tuple[Frozen, Frozen],
    choices: tuple[EngineChoice, EngineChoice],
    store: Store,
    *,
    seed: int,
    clock: Clock,
    events: Events,
) -> OpenSession:
    """Engines for both sides where they share a start, else of the side that a start measures."""

    def opener(frozen: Frozen, choice: EngineChoice, args: Mapping[str, Scalar]) -> OpenSession:
        profile = profile_of(frozen, plan.rounds, args)
        return frozen_opener(profile, choice, store, seed=seed, clock=clock, events=events)

    if plan.shared is not None:
        return opener(files[0], choices[0], common_args(*files))
    openers = [opener(frozen, choice, frozen.engine_args) for frozen, choice in zip(files, choices, strict=True)]
    by_side = dict(zip(IDS, openers, strict=True))
    return lambda start, number: by_side[str(start.settings[0].id)](start, number)


async def run_compare(
    plan: ComparePlan, store: Store, open_session: OpenSession, clock: Clock, events: Events
) -> Comparison:
    """The comparison, kept in `store`. EngineError and LoadError: a start failed, and there is no verdict."""
    results = await measure(plan.design(), store, open_session, clock, events)
    result = plan.result(results, notes_of(results))
    write_result(store, "compare", result.to_json())
    return result
