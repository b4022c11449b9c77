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
from tuner.engine.installed import inspect_installed
from tuner.errors import LoadError
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import Named, StartPlan
from tuner.experiment.events import Events
from tuner.experiment.session import OpenSession, RoundResult, Session, SessionFacts, open_server
from tuner.experiment.store import Store
from tuner.load.target import Target
from tuner.regress.compare import IDS, ComparePlan, Comparison, common_args, shared_start
from tuner.regress.measure import frozen_opener, measure, notes_of, profile_of, write_result
from tuner.regress.verdict import Rules
from tuner.scheduler.handles import supports_budget, supports_live

_SERVER = "server"


def compare_servers(urls: tuple[str, str], gate: list[str], rules: Rules, *, cycles: int) -> ComparePlan:
    """Two servers, measured in turn."""
    label = " and ".join(f"{side} {url}" for side, url in zip(IDS, urls, strict=True))
    settings = tuple(Named(side, Setting(knobs={_SERVER: side})) for side in IDS)
    shared = StartPlan("compare", label, {}, settings, live=False)
    return ComparePlan(urls, gate, rules, cycles, shared=shared)


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


async def compare_files(
    plan: ComparePlan,
    choices: tuple[EngineChoice, EngineChoice],
    store: Store,
    *,
    live: bool,
    seed: int,
    clock: Clock,
    events: Events,
) -> Comparison:
    """The verdict on two configurations; with `live` on shared starts where that is possible."""
    files = plan.files
    assert files is not None, "a plan of frozen files"
    reason = await _not_shared(files, choices) if live else "--no-live was given"
    how = f"get fresh starts in turn: {reason}" if reason else "are measured on the same starts"
    events.message(f"A and B {how}", routine=True)
    if not reason:
        plan = dataclasses.replace(plan, shared=shared_start(*files))

    def opener(frozen: Frozen, choice: EngineChoice, args: Mapping[str, Scalar]) -> OpenSession:
        profile = profile_of(frozen, plan.rounds, args)
        return frozen_opener(profile, choice, store, seed=seed, clock=clock, events=events)

    by_side = {
        side: opener(frozen, choice, frozen.engine_args if reason else common_args(*files))
        for side, frozen, choice in zip(IDS, files, choices, strict=True)
    }
    return await run_compare(
        plan, store, lambda start, number: by_side[str(start.settings[0].id)](start, number), clock, events
    )


async def _not_shared(files: tuple[Frozen, Frozen], choices: tuple[EngineChoice, EngineChoice]) -> str:
    """Why a start cannot measure both; '' when it can."""
    if choices[0] != choices[1]:
        return "they were measured with different vLLM commands"
    if shared_start(*files) is None:
        return "they differ in more than what can be switched live"
    if choices[0].simulated:
        return ""
    installed = await inspect_installed(choices[0].launcher, {**choices[0].env, **files[0].engine_env})
    budget = any(f.reuse_budget is not None for f in files)
    return supports_live(installed.version) or (supports_budget(installed.version) if budget else "")


async def run_compare(
    plan: ComparePlan, store: Store, open_session: OpenSession, clock: Clock, events: Events
) -> Comparison:
    """The comparison, kept in `store`. EngineError and LoadError: a start failed, and there is no verdict."""
    results = await measure(plan.design(), store, open_session, clock, events)
    result = plan.result(results, notes_of(results))
    write_result(store, "compare", result.to_json())
    return result
