"""The real `vllm serve` on the CPU, made to fail: each failure is diagnosed by its code. And one that works."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tuner.engine.installed import InstalledEngine, check_options, inspect_installed
from tuner.engine.launch import LaunchSpec, launched, port_is_free
from tuner.engine.processes import identify
from tuner.errors import EngineError
from tuner.sim.tiny_model import make_tiny_model

FOUND = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "vllm"
VLLM = os.environ.get("CHUNKTUNE_TEST_VLLM") or (str(FOUND) if FOUND.exists() else "")
pytestmark = pytest.mark.skipif(not VLLM, reason="CHUNKTUNE_TEST_VLLM names no vllm command, .venv-vllm has none")
SOUND = {
    "load_format": "dummy",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def spec(model: str, folder: Path, **changes: Any) -> LaunchSpec:
    return LaunchSpec(
        launcher=(VLLM,),
        kind="vllm",
        model=model,
        args={**SOUND, **changes},
        env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        log_path=folder / "engine.log",
        startup_timeout_s=400,
        record_dir=folder / "records",
    )


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"block_size": 16}, "block_size", "No common block size for 16"),
        ({"max_num_batched_tokens": 32}, "invalid_combination", "max_num_seqs (64)"),
        ({"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, "invalid_combination", "max_model_len"),
        ({"scheduler_policy": "fcfs"}, "unknown_option", "--scheduler-policy"),
        ({"max_num_seqs": "many"}, "bad_option_value", "--max-num-seqs"),
        ({"num_gpu_blocks_override": 20}, "kv_cache_too_small", "KV cache is needed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refused_configuration(
    model: str, tmp_path: Path, changes: dict[str, Any], code: str, words: str
) -> None:
    given = spec(model, tmp_path, **changes)
    with pytest.raises(EngineError) as caught:
        async with launched(given):
            pytest.fail("this vLLM takes what it should refuse")
    assert caught.value.diagnosis.code == code, caught.value.message
    assert words in caught.value.message
    assert list(given.record_dir.glob("engine-*")) == []


async def test_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        async with launched(spec(str(tmp_path / "nowhere"), tmp_path)):
            pytest.fail("there is no such model")
    assert caught.value.diagnosis.code == "missing_model"


async def test_a_sound_configuration_is_read_back_and_ends_whole(model: str, tmp_path: Path) -> None:
    async with launched(spec(model, tmp_path)) as engine:
        seen = [p for p in map(identify, engine.process_ids()) if p is not None]
        port = engine.port
        assert len(seen) >= 3
        assert engine.exited() is None
        for key in ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len"):
            assert engine.effective.args[key] == SOUND[key]
        assert engine.effective.args["enable_chunked_prefill"] is True
        assert engine.effective.block_size == 32
        assert engine.effective.kv_cache_tokens == 256 * 32
        assert engine.effective.vllm_version
    assert [p for p in seen if identify(p.pid) == p] == []
    assert port_is_free(port)


async def test_the_installed_options_are_asked() -> None:
    installed: InstalledEngine = await inspect_installed((VLLM,), {})
    assert installed.version
    assert {"max_num_batched_tokens", "no_enable_chunked_prefill", "scheduler_cls"} <= installed.options
    with pytest.raises(EngineError, match="--scheduling-policy"):
        check_options(installed, {"scheduling_polcy": "fcfs"})
