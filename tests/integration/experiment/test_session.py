"""Starts on the fake `vllm`: settings switched and proven, faults told, and servers that make careless numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.designs import CyclesOf
from tuner.clock import SYSTEM_CLOCK
from tuner.domain.experiment import Results, Start
from tuner.domain.setting import CHUNK_KNOB, STOCK, ReuseBudget, Setting
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import Named
from tuner.experiment.events import Silent
from tuner.experiment.runner import run
from tuner.experiment.session import engine_opener
from tuner.experiment.store import Store
from tuner.profile import parse_profile

FAKE = Path(__file__).parents[2] / "fakes" / "fake_vllm.py"
PROFILE = """\
version: 1
name: switched
model: fake/model
engine: {args: {max_model_len: 2048, max_num_seqs: 16}, startup_timeout: 20s}
workload: {kind: shared-prefix, system_prompt_tokens: 512, user_prompt_tokens: [20, 40], output_tokens: [4, 6],
  concurrency: 2, requests: 8, request_timeout: 2s}
space: {max_num_batched_tokens: [256]}
"""
STEADY: dict[str, Any] = {"ttft_ms": 40, "token_ms": 3}
"""Slow enough that a busy test machine is no limit to the client."""
STOCK_NAMED = Named("stock", STOCK)
SMALL = Named(0, Setting(knobs={CHUNK_KNOB: 256}))
LARGE = Named(1, Setting(knobs={CHUNK_KNOB: 1024}))
BOOT: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, CHUNK_KNOB: 8192}


async def measured(
    folder: Path, design: CyclesOf, *, overrides: tuple[str, ...] = (), env: dict[str, str] | None = None, **script: Any
) -> Results:
    """The design's rounds on the fake vLLM that this script makes."""
    profile = parse_profile(PROFILE, overrides=[*overrides])
    fake = {"FAKE_VLLM": json.dumps({**STEADY, "state": str(folder / "state"), **script})}
    choice = EngineChoice("vllm", (sys.executable, str(FAKE)), "a test", {**fake, **(env or {})})
    store = Store(folder / "study")
    opener = engine_opener(
        profile, choice, seed=0, log_path=store.engine_log, record_dir=folder / "records", events=Silent()
    )
    return await run(design, store, opener, SYSTEM_CLOCK, Silent())


def live(*settings: Named, **more: Any) -> CyclesOf:
    return CyclesOf(settings, args=BOOT, **more)


def only_start(results: Results) -> Start:
    assert len(results.starts) == 1
    return results.starts[0]


async def test_settings_are_switched_within_a_start_and_each_round_proves_its_own(tmp_path: Path) -> None:
    results = await measured(tmp_path, live(STOCK_NAMED, SMALL, LARGE), ttft_ms_by_chunk={"256": 90, "1024": 60})
    start = only_start(results)
    assert start.state == "completed", start.message
    assert start.effective_args is not None
    assert start.effective_args[CHUNK_KNOB] == start.stock_chunk == 8192
    assert "tuner.scheduler.LiveScheduler" in start.command
    for name, chunk, least_ms in (("stock", 8192, 40), (0, 256, 90), (1, 1024, 60)):
        kept = results.kept(name)
        assert len(kept) == 2
        for row in kept:
            assert row.measurement.ttft_ms is not None
            assert row.measurement.ttft_ms.p50 >= least_ms
            assert 0 < row.measurement.plugin["largest_step_tokens"] <= chunk
            assert row.measurement.prefix_hit_rate is not None
    cold = {name: results.kept(name)[0].measurement.plugin["prefill_chunks"] for name in (0, 1)}
    assert cold[0] > cold[1], "a cold prompt of 530 tokens takes three steps of 256 and one of 1024"


async def test_the_stock_setting_is_the_profiles_own_where_a_start_is_larger(tmp_path: Path) -> None:
    own = ("engine.args.max_num_batched_tokens=512",)
    results = await measured(tmp_path, live(STOCK_NAMED, cycles=1), overrides=own)
    (row,) = results.kept("stock")
    assert row.measurement.plugin["largest_step_tokens"] == 512


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ({"forgets_chunk": 256}, "not_as_applied", "requested max_num_batched_tokens 256, running 8192"),
        ({"refuses_chunk": 256}, "switch_refused", "a fault on demand"),
    ],
)
async def test_a_setting_that_does_not_run_is_not_measured(
    tmp_path: Path, fault: dict[str, Any], code: str, words: str
) -> None:
    results = await measured(tmp_path, live(STOCK_NAMED, SMALL, cycles=1), live=fault)
    assert only_start(results).state == "completed"
    assert results.kept(0) == []
    lost = [r for r in results.rounds if not r.kept and r.code != "client_limited"]
    assert {r.code for r in lost} == {code}
    assert words in (lost[0].reason or "")
    assert len(results.kept("stock")) == 1


async def test_a_budget_within_the_start_is_switched_too(tmp_path: Path) -> None:
    budget = Named(2, Setting(reuse_budget=ReuseBudget(min_reuse_ratio=0.5)))
    results = await measured(tmp_path, live(STOCK_NAMED, budget, cycles=1))
    assert [r.setting for r in results.kept()] == ["stock", 2]


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ({"load": [{"exit": 1, "log": "died_under_load", "chunk_below": 300}]}, "engine_died"),
        ({"load": [{"exit": 1, "log": "cuda_oom_under_load", "chunk_below": 300}]}, "cuda_oom"),
        ({"load": [{"stall": True, "chunk_below": 300, "after_requests": 20}]}, "engine_stalled"),
        ({"live": {"silent": True}}, "live_lost"),
    ],
    ids=["dies", "out of memory", "stalls", "does not answer"],
)
async def test_an_engine_that_fails_in_mid_cycle(
    tmp_path: Path, script: dict[str, Any], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.engine.live.ANSWER_WAIT_S", 0.3)
    results = await measured(tmp_path, live(STOCK_NAMED, SMALL), **script)
    start = only_start(results)
    assert (start.state, start.cause) == ("engine_failed", cause), start.message
    assert start.hint
    if cause != "live_lost":
        assert start.failed_setting == 0
        assert [r.setting for r in results.kept()] == ["stock"]


async def test_a_warm_up_may_stand_still_as_long_as_the_start_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model's kernels are compiled at its first requests."""
    monkeypatch.setattr("tuner.experiment.session.STALL_TIMEOUT_S", 0.5)
    slow = {"ready_after_s": 4, "first_slow": {"requests": 6, "ms": 1500}}
    patient = ("workload.request_timeout=30s",)
    results = await measured(tmp_path, live(STOCK_NAMED, cycles=1), overrides=patient, **slow)
    start = only_start(results)
    assert (start.state, start.warnings) == ("completed", []), start.message


async def test_a_read_back_without_the_server_s_own_configuration_is_said_to_be_weaker(tmp_path: Path) -> None:
    results = await measured(tmp_path, live(STOCK_NAMED, cycles=1), server_info="error")
    start = only_start(results)
    assert start.state == "completed"
    assert "checked against its log and /metrics only" in start.warnings[0]


async def test_a_server_that_remembers_prompts_is_never_asked_twice(tmp_path: Path) -> None:
    """A prompt seen before is answered 50 times faster; a switch alone would not make it forget."""
    results = await measured(tmp_path, live(SMALL, LARGE, cycles=1), remember={"unseen_ms": 300, "seen_ms": 6})
    cold = [r.measurement.cold_ttft_ms for r in results.kept()]
    assert len(cold) == 2
    assert all(one is not None and one.p99 > 290 for one in cold)


async def test_a_server_that_is_slow_for_its_first_requests_is_warmed_up(tmp_path: Path) -> None:
    results = await measured(tmp_path, live(SMALL, cycles=1), first_slow={"requests": 4, "ms": 800})
    (row,) = results.kept()
    assert row.measurement.cold_ttft_ms is not None
    assert row.measurement.cold_ttft_ms.p99 < 700


@pytest.mark.parametrize("fault", ["empty_share", "error_event_share", "cut_share", "http_error_share"])
async def test_failed_requests_are_no_fast_ones(tmp_path: Path, fault: str) -> None:
    """Empty streams come back at once: counted as successes they would be the fastest of all."""
    results = await measured(tmp_path, live(SMALL, cycles=1), **{fault: 0.3})
    assert results.kept() == []
    assert results.rounds
    assert all("failed" in (r.reason or "") for r in results.rounds)


async def test_a_role_without_a_token_is_no_first_token(tmp_path: Path) -> None:
    results = await measured(
        tmp_path,
        live(STOCK_NAMED, cycles=1),
        overrides=("workload.api=chat",),
        ttft_ms=200,
        role_delay_ms_per_1000_chunk=1,
    )
    (row,) = results.kept()
    assert row.measurement.ttft_ms is not None
    assert row.measurement.ttft_ms.p50 > 190
