"""Rounds until enough count: which are driven again, after what pause, and when it is given up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.fakes.frozen_trials import round_of
from tuner.clock import FakeClock
from tuner.domain.observation import ClientStats, MemoryTimeline, RoundObservation
from tuner.trial.progress import Silent
from tuner.trial.rounds import counting, enough_rounds
from tuner.experiment.session import RoundResult, Session

LIMITED = "client_limited"


@dataclass
class ScriptedSession:
    """Rounds that end as `codes` say, '' for one that counts; notes when each began and its key."""

    clock: FakeClock
    codes: list[str]
    began: list[tuple[float, str]] = field(default_factory=list)

    async def round(self, key: str) -> RoundResult:
        code = self.codes[len(self.began)]
        self.began.append((self.clock.monotonic_s(), key))
        self.clock.advance(10.0)
        void = f"because of {code}" if code else None
        end_s = self.clock.monotonic_s()
        client = ClientStats(0.1, 8, 8, 0.1, limited=code == LIMITED)
        seen = RoundObservation([], client, end_s - 10.0, end_s - 10.0, end_s, void or "", code)
        return RoundResult(round_of(80.0, void=void), seen, MemoryTimeline("unavailable", [], {}))


async def played(codes: list[str], wanted: int) -> tuple[Any, ScriptedSession, list[RoundResult]]:
    clock = FakeClock(start_s=0.0)
    session = ScriptedSession(clock, codes)
    seen: list[RoundResult] = []

    def keep(results: list[RoundResult]) -> None:
        seen[:] = results

    diagnosis = await enough_rounds(cast(Session, session), wanted, "t", clock, Silent(), keep)
    return diagnosis, session, seen


async def test_rounds_that_count_follow_each_other_without_a_pause() -> None:
    diagnosis, session, seen = await played(["", "", ""], 3)
    assert diagnosis is None
    assert len(counting(seen)) == 3
    assert [at for at, _ in session.began] == [0.0, 10.0, 20.0]
    assert len({key for _, key in session.began}) == 3


async def test_a_busy_moment_is_waited_out_longer_the_second_time() -> None:
    diagnosis, session, seen = await played([LIMITED, LIMITED, ""], 1)
    assert diagnosis is None
    assert len(seen) == 3
    assert [at for at, _ in session.began] == [0.0, 12.0, 30.0]


async def test_what_waiting_does_not_mend_is_repeated_at_once() -> None:
    diagnosis, session, _ = await played(["warm_cache", ""], 1)
    assert diagnosis is None
    assert [at for at, _ in session.began] == [0.0, 10.0]


@pytest.mark.parametrize(("code", "driven"), [(LIMITED, 3), ("auth", 1), ("engine_stalled", 1)])
async def test_when_it_is_given_up(code: str, driven: int) -> None:
    diagnosis, session, _ = await played([code] * 5, 1)
    assert diagnosis is not None
    assert diagnosis.code == code
    said = "3 of 3 rounds do not count" if driven == 3 else "1 of 1 round does not count"
    assert f"{said}: because of {code}" in diagnosis.message
    assert len(session.began) == driven
