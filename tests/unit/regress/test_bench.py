"""`bench` in one start, on a fake engine: complete, given up, and interrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.frozen import PROFILE
from tests.fakes.heard import Heard
from tests.fakes.sessions import FakeEngines, Fault, Level
from tuner.clock import FakeClock
from tuner.experiment.design import StudyStopped
from tuner.experiment.events import Silent
from tuner.experiment.runner import run
from tuner.experiment.store import Store
from tuner.regress.bench import bench_design, bench_result


def engines(*faults: Fault) -> FakeEngines:
    return FakeEngines(lambda _: Level(100.0), FakeClock(), list(faults))


async def test_a_bench_is_one_start_with_its_rounds(tmp_path: Path) -> None:
    server, store = engines(), Store(tmp_path)
    await run(bench_design("http://a", 3), store, server.open, server.clock, Silent())
    result = bench_result(store, PROFILE)
    document = result.to_json()
    assert (document["purpose"], document["state"], document["label"]) == ("bench", "completed", "http://a")
    assert [r["setting"] for r in document["rounds"]] == ["server"] * 3
    assert document["median"]["ttft_ms"]["p90"] == pytest.approx(100.0, rel=0.05)
    assert document["ci95"]["ttft_ms.p90"]
    assert document["violates"] == []
    assert result.pooled["ttft_ms"].n == 60


async def test_a_bench_with_too_many_discarded_rounds_says_why(tmp_path: Path) -> None:
    faults = [Fault("discard", "http_error", nth=n, message="HTTP 500") for n in (2, 3, 4)]
    server, store = engines(*faults), Store(tmp_path)
    with pytest.raises(StudyStopped):
        await run(bench_design("http://a", 3), store, server.open, server.clock, Silent())
    result = bench_result(store, PROFILE)
    assert (result.start.state, result.start.message, result.kept) == ("load_failed", "HTTP 500", 1)
    assert len(store.results().starts) == 1, "a server is not asked again"


async def test_an_interrupted_bench_has_the_rounds_that_had_finished(tmp_path: Path) -> None:
    def cancel(rounds: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        if rounds == 2:
            task.cancel()

    server, store = engines(), Store(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        await run(bench_design("http://a", 3), store, server.open, server.clock, Heard(cancel))
    result = bench_result(store, PROFILE)
    assert (result.start.state, result.kept) == ("interrupted", 1)
    assert result.median is not None


async def test_a_bench_without_a_round_that_counts_has_no_median(tmp_path: Path) -> None:
    server, store = engines(Fault("discard", "auth", message="HTTP 401")), Store(tmp_path)
    with pytest.raises(StudyStopped):
        await run(bench_design("http://a", 3), store, server.open, server.clock, Silent())
    result = bench_result(store, PROFILE)
    assert result.median is None
    assert result.to_json()["median"] is None
