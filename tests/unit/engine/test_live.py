"""The tuner's side of live control, against engines in this process and on a clock of the test's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.live_engine import BOOT, FakeLiveEngine
from tuner.clock import FakeClock
from tuner.engine.live import ANSWER_WAIT_S, LiveControl, LiveReport, SwitchRefused
from tuner.errors import EngineError
from tuner.scheduler.control import LAPSED
from tuner.scheduler.folder import FolderChannel, make_folder, write_command
from tuner.scheduler.messages import Command

CHUNK = {"max_num_batched_tokens": 512}
EVERY_VALUE = {**BOOT, **CHUNK, "reuse_budget": {"min_reuse_ratio": 0.5}}


class Server:
    """One or more data-parallel engines behind one address."""

    def __init__(self, folder: Path, *engines: dict[str, Any], on_probe: Callable[[], None] | None = None) -> None:
        self.folder = make_folder(folder)
        self.clock = FakeClock()
        self.engines = [
            FakeLiveEngine(FolderChannel(self.folder, number), number, **faults)
            for number, faults in enumerate(engines or ({},))
        ]
        self.on_probe = on_probe
        self.control = LiveControl(self.folder, len(self.engines), self._probe, self.clock)

    async def _probe(self, number: int) -> None:
        if self.on_probe is not None:
            self.on_probe()
        engine = self.engines[number]
        engine.now_s = self.clock.monotonic_s()
        engine.request_comes()

    def load(self, *steps: int) -> None:
        """A request to each engine, and steps of so many tokens."""
        for engine in self.engines:
            engine.now_s = self.clock.monotonic_s()
            engine.request_comes()
            for tokens in steps:
                engine.step(tokens, preemptions=1, usage=tokens / 1000)

    def running(self, name: str = "max_num_batched_tokens") -> list[Any]:
        return [engine.values[name] for engine in self.engines]


async def test_it_says_what_the_engine_was_started_with(tmp_path: Path) -> None:
    facts = await Server(tmp_path / "live", {"budget_reason": "not here"}).control.facts()
    assert facts.boot == BOOT
    assert facts.stock_chunk == 2048
    assert facts.budget_reason == "not here"


async def test_a_setting_is_applied_and_proved(tmp_path: Path) -> None:
    server = Server(tmp_path / "live")
    await server.control.apply(EVERY_VALUE, 60.0)
    server.load(512, 100)
    report = await server.control.report()
    assert report.mismatch(EVERY_VALUE) == ""
    assert report.counters["steps"] == 2
    assert report.counters["tokens"] == 612


async def test_every_engine_of_a_data_parallel_server_is_switched_and_counted(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {}, {})
    await server.control.apply(CHUNK, 60.0)
    assert server.running() == [512, 512]
    server.load(512, 100)
    report = await server.control.report()
    assert report.counters["tokens"] == 2 * 612
    assert report.counters["preemptions"] == 4
    assert report.counters["largest_step_tokens"] == 512
    assert report.counters["kv_usage_peak"] == 0.512


async def test_one_silent_engine_of_two_is_a_loss_in_bounded_time(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {}, {"silent": True})
    began_s = server.clock.monotonic_s()
    with pytest.raises(EngineError) as lost:
        await server.control.apply(CHUNK, 60.0)
    assert lost.value.diagnosis.code == "live_lost"
    assert "engine 1 of 2 did not answer" in lost.value.message
    assert server.clock.monotonic_s() - began_s < 2 * ANSWER_WAIT_S


async def test_the_answer_to_another_command_is_none(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {"silent": True})
    stranger = FakeLiveEngine(FolderChannel(server.folder, 0))

    def somebody_elses() -> None:
        write_command(server.folder, Command("another", "report"))
        stranger.request_comes()

    server.on_probe = somebody_elses
    with pytest.raises(EngineError, match="did not answer"):
        await server.control.facts()


async def test_a_refusal_is_passed_on_with_its_reason(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {}, {"budget_reason": "two kinds of cache"})
    with pytest.raises(SwitchRefused, match="above 8192, which this start is sized for"):
        await server.control.apply({"max_num_batched_tokens": 16384}, 60.0)
    with pytest.raises(SwitchRefused, match="two kinds of cache"):
        await server.control.apply({"reuse_budget": {"min_reuse_ratio": 0.5}}, 60.0)


async def test_a_deferred_switch_is_tried_again_until_the_engine_is_idle(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {"requests": 2}, {"blocks_in_use": 1})
    probes = iter(range(1, 100))

    def ends() -> None:
        if next(probes) == 5:
            server.engines[0].requests = 0

    server.on_probe = ends
    await server.control.apply(CHUNK, 60.0)
    assert server.running() == [512, 512]


async def test_an_engine_that_never_becomes_idle_is_lost_and_runs_what_it_ran(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {"requests": 3})
    with pytest.raises(EngineError, match="3 unfinished requests") as lost:
        await server.control.apply(CHUNK, 60.0)
    assert lost.value.diagnosis.code == "live_lost"
    assert server.running() == [8192]


async def test_a_command_that_cannot_be_written_loses_the_engine_not_the_setting(tmp_path: Path) -> None:
    server = Server(tmp_path / "live")
    shutil.rmtree(server.folder)
    with pytest.raises(EngineError, match="cannot be written") as caught:
        await server.control.apply(CHUNK, 60.0)
    assert caught.value.diagnosis.code == "live_lost"


async def test_a_command_that_the_engine_cannot_trust_loses_the_engine_not_the_setting(tmp_path: Path) -> None:
    server = Server(tmp_path / "live")
    server.on_probe = lambda: (server.folder / "command.json").chmod(0o666)
    with pytest.raises(EngineError, match="lets others in"):
        await server.control.apply(CHUNK, 60.0)
    with pytest.raises(EngineError, match="lets others in"):
        await server.control.report()


async def test_a_value_that_is_not_taken_shows_in_the_report(tmp_path: Path) -> None:
    server = Server(tmp_path / "live", {}, {"ignores": "max_num_batched_tokens"})
    await server.control.apply(CHUNK, 60.0)
    report = await server.control.report()
    assert report.mismatch(CHUNK) == "requested max_num_batched_tokens 512, running 8192 on engine 1"


async def test_after_the_lease_the_report_says_what_happened(tmp_path: Path) -> None:
    server = Server(tmp_path / "live")
    await server.control.apply(CHUNK, 60.0)
    server.load(512)
    server.clock.advance(61.0)
    report = await server.control.report()
    assert report.mismatch(CHUNK) == f"requested max_num_batched_tokens 512, running 8192; {LAPSED}"
    await server.control.apply(CHUNK, 60.0)
    assert (await server.control.report()).mismatch(CHUNK) == ""


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_num_batched_tokens": 512}, ""),
        ({"max_num_batched_tokens": None, "watermark": 0.1, "no_such_value": 1}, ""),
        ({"watermark": 0.100000000001, "reuse_budget": {"min_reuse_ratio": 0.5}}, ""),
        ({"enable_chunked_prefill": False}, "requested enable_chunked_prefill False, running True"),
        ({"reuse_budget": {}}, ""),
        (
            {"reuse_budget": {"min_reuse_ratio": 0.8, "evict_above": 0}},
            "requested reuse_budget min_reuse_ratio 0.8, running min_reuse_ratio 0.5",
        ),
    ],
    ids=str,
)
def test_a_difference_is_one_sentence(values: dict[str, Any], says: str) -> None:
    applied = {
        "max_num_batched_tokens": 512,
        "watermark": 0.1,
        "enable_chunked_prefill": True,
        "reuse_budget": {"min_reuse_ratio": 0.5, "evict_above": 0.0},
    }
    assert LiveReport([applied], {"largest_step_tokens": 512.0}).mismatch(values) == says


def test_a_step_larger_than_the_chunk_is_a_difference_too() -> None:
    report = LiveReport([CHUNK], {"largest_step_tokens": 513.0})
    assert report.mismatch(CHUNK) == "requested max_num_batched_tokens 512, a step had 513 tokens"
