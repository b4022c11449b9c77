"""The real `vllm serve` under live control: each setting is read back from its scheduler, under load too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tuner.domain.setting import ReuseBudget
from tuner.engine import live
from tuner.engine.launch import LaunchSpec, RunningEngine, launched
from tuner.engine.live import LiveControl, SwitchRefused
from tuner.errors import EngineError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BUDGET = ReuseBudget(max_cached_blocks=40, min_reuse_ratio=0.5, yield_chunk_tokens=128).to_json()
SETTINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 96},
    {"long_prefill_token_threshold": 96, "long_prefill_token_threshold_adaptive": True},
    {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False},
    {"scheduler_reserve_full_isl": False, "watermark": 0.05},
    {"max_num_active_seqs": 2},
    {"max_num_batched_tokens": 128, "reuse_budget": BUDGET},
    {},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(launch_spec: Callable[..., LaunchSpec]) -> AsyncIterator[RunningEngine]:
    """One start with the largest chunk."""
    async with launched(replace(launch_spec(max_num_batched_tokens=2048), live=True)) as running:
        yield running


def control(engine: RunningEngine) -> LiveControl:
    assert engine.live is not None
    return engine.live


async def ask(engine: RunningEngine, name: str, prompt_tokens: int, tokens: int) -> None:
    """One answered request with a prompt of its own."""
    prompt = random.Random(name).choices(range(3, 250), k=prompt_tokens)
    body = {"model": engine.model_id, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.post(f"{engine.base_url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(120)) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer


async def requests_waiting(engine: RunningEngine) -> None:
    """Return once requests queue in the engine; it is asked for at most 20 s."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        for _ in range(200):
            async with session.get(f"{engine.base_url}/metrics") as response:
                text = await response.text()
            if any(
                line.startswith("vllm:num_requests_waiting{") and float(line.rsplit(" ", 1)[1]) > 0
                for line in text.splitlines()
            ):
                return
            await asyncio.sleep(0.1)
    pytest.fail("no request queued in the engine")


async def test_it_says_what_it_was_started_with(engine: RunningEngine) -> None:
    facts = await control(engine).facts()
    assert facts.boot["max_num_batched_tokens"] == 2048
    assert facts.boot["max_num_active_seqs"] == 64
    # What vLLM takes on a CPU with one worker.
    assert facts.stock_chunk == 2048
    assert facts.budget_reason == ""


@pytest.mark.parametrize("values", SETTINGS, ids=str)
async def test_each_setting_is_read_back(engine: RunningEngine, values: dict[str, Any]) -> None:
    wanted = {**(await control(engine).facts()).boot, **values}
    await control(engine).apply(values, 120.0)
    await asyncio.gather(*(ask(engine, f"{values}/{number}", 700, 8) for number in range(6)))
    report = await control(engine).report()
    assert report.mismatch(wanted) == ""
    counters = report.counters
    assert counters["prefills"] == 6
    assert counters["tokens"] == 6 * (700 + 7)
    least = -(-700 // wanted["max_num_batched_tokens"])
    assert counters["prefill_chunks"] >= 6 * least
    assert 0 < counters["kv_usage_peak"] < 1
    assert ("preferred_requests" in counters) == ("reuse_budget" in values)


async def test_under_queued_requests_nothing_is_switched(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await control(engine).apply({"max_num_batched_tokens": 256, "max_num_active_seqs": 2}, 120.0)
    load = asyncio.gather(*(ask(engine, f"queued/{number}", 900, 300) for number in range(10)))
    await requests_waiting(engine)
    monkeypatch.setattr(live, "ANSWER_WAIT_S", 0.0)
    with pytest.raises(EngineError, match="unfinished requests"):
        await control(engine).apply({"max_num_batched_tokens": 64, "reuse_budget": BUDGET}, 120.0)
    assert not load.done()
    await load
    report = await control(engine).report()
    assert report.mismatch({"max_num_batched_tokens": 256, "max_num_active_seqs": 2, "reuse_budget": {}}) == ""
    assert report.applied[0]["reuse_budget"]["max_cached_blocks"] == 0
    assert report.counters["largest_step_tokens"] == 256
    monkeypatch.undo()
    await control(engine).apply({"max_num_batched_tokens": 64}, 120.0)
    assert (await control(engine).report()).mismatch({"max_num_batched_tokens": 64}) == ""


async def test_what_the_start_has_no_room_for_is_refused(engine: RunningEngine) -> None:
    with pytest.raises(SwitchRefused, match="above 2048"):
        await control(engine).apply({"max_num_batched_tokens": 4096}, 120.0)


async def test_when_the_lease_runs_out_it_is_as_it_was_started(engine: RunningEngine) -> None:
    await control(engine).apply({"max_num_batched_tokens": 64}, 0.2)
    await asyncio.sleep(0.3)
    await ask(engine, "after the lease", 700, 1)
    report = await control(engine).report()
    assert "running 2048; the lease ran out" in report.mismatch({"max_num_batched_tokens": 64})
