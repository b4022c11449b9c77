"""Engines whose TTFT is scripted start by start, for runs of `regress` and `compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.frozen import round_of
from tests.fakes.sessions import FakeEngines, Level
from tuner.clock import FakeClock
from tuner.domain.experiment import Results, Round, SettingId, Start
from tuner.domain.measurement import Measurement
from tuner.domain.setting import Setting
from tuner.experiment.design import StartPlan
from tuner.experiment.events import Events, Silent
from tuner.experiment.session import Session
from tuner.experiment.store import Store
from tuner.regress.design import Staged
from tuner.regress.measure import measure


@dataclass
class ScriptedStarts(FakeEngines):
    """`p90s` are the TTFT P90 of each setting's starts, by its id; the last one repeats for ever."""

    p90s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    """Failed requests a round."""
    order: list[SettingId] = field(default_factory=list)
    """What was started, in order; each setting of a live start."""
    _named: dict[str, SettingId] = field(default_factory=dict)
    _rounds: Counter[SettingId] = field(default_factory=Counter)

    @asynccontextmanager
    async def open(self, plan: StartPlan, number: int) -> AsyncIterator[Session]:
        self.order += [named.id for named in plan.settings]
        self._named = {named.setting.key: named.id for named in plan.settings}
        self._rounds.clear()
        async with super().open(plan, number) as session:
            yield session

    def measured(self, setting: Setting, start: int, content_key: str, arrivals_key: str) -> Measurement:
        name = self._named[setting.key]
        values = self.p90s[str(name)]
        p90 = values[min(self.order.count(name), len(values)) - 1]
        wobble = (0.0, -0.004, 0.004)[self._rounds[name] % 3]
        self._rounds[name] += 1
        found = round_of(p90 * (1 + wobble), 40.0 * (1 - wobble))
        return found.model_copy(update={"failed_requests": self.failed.get(str(name), 0)})


def scripted(p90s: Mapping[str, Sequence[float]], **more: Any) -> ScriptedStarts:
    """`ScriptedStarts` with a clock of its own."""
    return ScriptedStarts(lambda _: Level(100.0), FakeClock(), p90s=p90s, **more)


@dataclass(frozen=True)
class MemoryStore(Store):
    """A store that writes nothing; the runner itself adds to the results that it was given."""

    kept: Results = field(default_factory=Results)

    def results(self) -> Results:
        return self.kept

    def next_start_number(self) -> int:
        return 1 + len(self.kept.starts)

    def write_start(self, start: Start) -> None: ...

    def append_round(self, row: Round) -> None: ...

    def write_round_data(self, *_: object) -> None: ...


async def carry_out(design: Staged, engines: FakeEngines, events: Events | None = None) -> Results:
    """The results of a design, none of which is written."""
    return await measure(design, MemoryStore(Path("nowhere/run")), engines.open, engines.clock, events or Silent())
