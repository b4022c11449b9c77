"""A start under live control: its folder, its answers over HTTP, and its end."""

from __future__ import annotations

import asyncio
import importlib.util
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.engine.conftest import MakeSpec
from tuner.engine.launch import LaunchSpec, RunningEngine, launched
from tuner.engine.live import SwitchRefused
from tuner.engine.readiness import send_one_token
from tuner.errors import EngineError, UsageError

NO_TABLES = importlib.util.find_spec("aiconfigurator_core") is None
SIMULATED = pytest.param("sim", marks=pytest.mark.skipif(NO_TABLES, reason="no step-time tables (extra `sim`)"))


@pytest.fixture(params=["fake", SIMULATED])
def spec(request: pytest.FixtureRequest, make_spec: MakeSpec) -> LaunchSpec:
    args = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 1024}
    if request.param == "fake":
        return replace(make_spec(args=args), live=True)
    launcher = (sys.executable, "-m", "tuner.sim")
    made = make_spec(args=args, launcher=launcher)
    return replace(made, live=True, kind="sim", model="meta-llama/Llama-3.1-8B-Instruct", env={})


def folders(spec: LaunchSpec) -> list[Path]:
    return sorted(spec.record_dir.glob("live-*"))


async def test_a_live_start_can_be_switched_and_leaves_nothing(
    spec: LaunchSpec, left_over: Callable[[], object]
) -> None:
    async with launched(spec) as engine:
        [folder] = folders(spec)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert "--additional-config" not in engine.command
        assert str(folder) not in " ".join(engine.command)
        assert engine.live is not None
        facts = await engine.live.facts()
        assert facts.boot["max_num_batched_tokens"] == 512
        assert facts.stock_chunk == 8192
        values = {"max_num_batched_tokens": 64, "reuse_budget": {"min_reuse_ratio": 0.5}}
        await engine.live.apply(values, 60.0)
        await ask(engine)
        report = await engine.live.report()
        assert report.mismatch(values) == ""
        assert report.counters["steps"] >= 1
        assert report.counters["prefills"] == 1
        with pytest.raises(SwitchRefused, match="above 512"):
            await engine.live.apply({"max_num_batched_tokens": 1024}, 60.0)
        await engine.live.apply({}, 60.0)
        assert (await engine.live.report()).applied == [facts.boot]
    assert folders(spec) == []
    assert left_over() == []


async def ask(engine: RunningEngine) -> None:
    await asyncio.wait_for(send_one_token(engine.base_url, engine.model_id, {}), 30)


async def test_an_engine_that_dies_is_told_from_one_that_is_silent(make_spec: MakeSpec) -> None:
    dies = make_spec(live={"silent": True}, load=[{"exit": 1, "text": "RuntimeError: gone"}])
    async with launched(replace(dies, live=True)) as engine:
        assert engine.live is not None
        with pytest.raises(EngineError) as caught:
            await engine.live.facts()
    assert caught.value.diagnosis.code == "engine_died"
    assert folders(dies) == []


async def test_a_live_start_that_fails_leaves_no_folder(make_spec: MakeSpec) -> None:
    fails = replace(make_spec(start=[{"log": "no_free_memory", "exit": 1}]), live=True)
    with pytest.raises(EngineError):
        async with launched(fails):
            pytest.fail("it never was ready")
    assert folders(fails) == []
    with pytest.raises(UsageError):
        async with launched(replace(fails, launcher=("no-such-command",))):
            pytest.fail("there is nothing to start")
    assert folders(fails) == []


async def test_a_version_that_cannot_be_switched_says_so(make_spec: MakeSpec) -> None:
    with pytest.raises(EngineError) as caught:
        async with launched(replace(make_spec(version="0.29.0"), live=True)):
            pytest.fail("it was started")
    assert caught.value.diagnosis.code == "plugin_failed"
    assert "live control cannot run here" in caught.value.message
    assert "--no-live" in caught.value.message


async def test_an_engine_without_live_control_has_none(make_spec: MakeSpec) -> None:
    plain = make_spec()
    async with launched(plain) as engine:
        assert engine.live is None
        assert folders(plain) == []
