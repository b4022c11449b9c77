"""A real `vllm serve` on a GPU, with a small model: where it differs from what the documentation and the fakes say."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tuner.domain.setting import ReuseBudget
from tuner.engine.launch import LaunchSpec, RunningEngine, launched
from tuner.engine.live import LiveControl, SwitchRefused
from tuner.experiment.store import read_study
from tuner.sim.tiny_model import make_tiny_model
from tuner.telemetry import describe_devices
from tuner.telemetry.nvml import DeviceFacts

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

CHUNK = 2048
SLACK_BYTES = 512 << 20
STOP_S = 60.0
SETTINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 128},
    {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 96},
    {"max_num_active_seqs": 2},
    {"max_num_batched_tokens": 256, "reuse_budget": ReuseBudget(max_cached_blocks=40, min_reuse_ratio=0.5).to_json()},
    {},
]
PROFILE = """\
version: 1
name: gpu-tiny
model: {model}
engine:
  args: {{load_format: dummy, max_model_len: 2048, max_num_seqs: 32, gpu_memory_utilization: 0.30}}
  env: {{HF_HUB_OFFLINE: "1"}}
  startup_timeout: 10m
workload: {{kind: shared-prefix, system_prompt_tokens: 512, user_prompt_tokens: [16, 48], output_tokens: [4, 8],
  concurrency: 8, requests: 40}}
space: {{max_num_batched_tokens: [128, 512], refine: false}}
constraints: [failed_requests == 0]
budget: {{time: 8m}}
"""


@pytest.fixture(scope="module")
def vllm() -> str:
    command = os.environ.get("CHUNKTUNE_TEST_VLLM") or shutil.which("vllm")
    if command is None:
        pytest.skip("no `vllm` command here; point CHUNKTUNE_TEST_VLLM at one")
    return command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def used_bytes() -> dict[str, int]:
    return {device.uuid: device.used_bytes for device in describe_devices(count=1).devices}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningEngine]:
    """A live start on the first GPU; its end is a check too: in time, and with the memory given back."""
    folder = tmp_path_factory.mktemp("engine")
    spec = LaunchSpec(
        launcher=(vllm,),
        kind="vllm",
        model=model,
        args={
            "load_format": "dummy",
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": CHUNK,
            "gpu_memory_utilization": 0.3,
        },
        env={"HF_HUB_OFFLINE": "1"},
        log_path=folder / "engine.log",
        startup_timeout_s=600,
        record_dir=folder / "records",
        live=True,
    )
    before = used_bytes()
    async with launched(spec) as running:
        yield running
        began_s = time.monotonic()
    assert time.monotonic() - began_s < STOP_S, "the engine took too long to stop"
    deadline_s = time.monotonic() + 30
    while any(used > before[uuid] + SLACK_BYTES for uuid, used in used_bytes().items()):
        assert time.monotonic() < deadline_s, "the engine's memory was not given back"
        await asyncio.sleep(0.5)


def control(engine: RunningEngine) -> LiveControl:
    assert engine.live is not None
    return engine.live


async def ask(engine: RunningEngine, name: str) -> None:
    """One answered request of 700 tokens of its own."""
    prompt = random.Random(name).choices(range(3, 250), k=700)
    body = {"model": engine.model_id, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.post(f"{engine.base_url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(120)) as response,
    ):
        assert response.status == 200, await response.text()


async def test_its_log_tells_its_memory(engine: RunningEngine, devices: DeviceFacts) -> None:
    effective = engine.effective
    breakdown = effective.breakdown
    assert effective.vllm_version
    assert effective.warning == ""
    assert breakdown.weights_bytes is not None, "no line 'Model loading took'"
    assert breakdown.activation_peak_bytes is not None, "no line 'GiB for peak activation'"
    assert breakdown.kv_pool_bytes, "no line 'Available KV cache memory'"
    assert effective.kv_cache_tokens, "no line 'GPU KV cache size'"
    total = max(device.memory_bytes for device in devices.devices)
    assert breakdown.kv_pool_bytes < 0.3 * total


async def test_its_memory_is_seen_on_the_first_gpu_alone(engine: RunningEngine, devices: DeviceFacts) -> None:
    pool = engine.effective.breakdown.kv_pool_bytes or 0
    held = describe_devices()
    assert held.devices[0].used_bytes >= pool
    others = {d.uuid: d.used_bytes for d in devices.devices[1:]}
    assert all(d.used_bytes <= others[d.uuid] + SLACK_BYTES for d in held.devices[1:])


@pytest.mark.parametrize("values", SETTINGS, ids=str)
async def test_each_setting_is_read_back(engine: RunningEngine, values: dict[str, Any]) -> None:
    wanted = {**(await control(engine).facts()).boot, **values}
    await control(engine).apply(values, 120.0)
    await asyncio.gather(*(ask(engine, f"{values}/{number}") for number in range(6)))
    report = await control(engine).report()
    assert report.mismatch(wanted) == ""
    assert report.counters["prefills"] == 6


async def test_a_chunk_above_that_of_the_start_is_refused(engine: RunningEngine) -> None:
    with pytest.raises(SwitchRefused, match=f"above {CHUNK}"):
        await control(engine).apply({"max_num_batched_tokens": 2 * CHUNK}, 120.0)


def test_a_sweep_ends_with_a_verdict_and_a_command(vllm: str, model: str, tmp_path: Path, devices: DeviceFacts) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE.format(model=model))

    def chunktune(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tuner", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s, check=False)

    done = chunktune("sweep", "profile.yaml", "--vllm", vllm, "--json", timeout_s=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "cannot be switched" not in done.stderr
    document = json.loads(done.stdout)
    assert document["simulated"] is False
    study = read_study(tmp_path / "results" / "gpu-tiny")
    assert [s.purpose for s in study.results.starts] == ["search", "final", "final", "final", "literal"]
    assert {s.state for s in study.results.starts} == {"completed"}
    uuids = {device.uuid: device.memory_bytes for device in devices.devices}
    for row in study.results.kept():
        memory = row.measurement.memory
        assert memory.source == "nvml"
        peaks = memory.peak_bytes or {}
        assert len(peaks) == 1
        assert all(0 < peak <= uuids[uuid] for uuid, peak in peaks.items())
        assert memory.peak_fraction is not None
        assert memory.peak_fraction >= 0.2, "vLLM preallocates its pool"
    literal = [r for r in study.results.kept() if r.start == study.results.starts[-1].number]
    assert literal, "the frozen command was measured"
    served = chunktune("serve", "results/gpu-tiny/frozen.json", "--dry-run", timeout_s=60)
    assert served.returncode == 0, served.stderr
