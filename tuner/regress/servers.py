"""Servers that run already, measured as the settings of one start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tuner.clock import Clock
from tuner.domain.setting import Setting
from tuner.domain.workload import Workload
from tuner.errors import LoadError
from tuner.experiment.design import Named, StartPlan
from tuner.experiment.events import Events
from tuner.experiment.session import OpenSession, RoundResult, Session, SessionFacts, open_server
from tuner.load.target import Target

_SERVER = "server"


def server_setting(side: str) -> Named:
    """The setting that stands for one of several servers."""
    return Named(side, Setting(knobs={_SERVER: side}))


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
