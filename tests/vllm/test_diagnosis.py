"""Starts of the real `vllm serve` on the CPU that fail, each with the code of its cause. And one that works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.engine.installed import check_options, inspect_installed
from tuner.engine.launch import LaunchSpec, launched, port_is_free
from tuner.engine.processes import identify
from tuner.errors import EngineError

MakeSpec = Callable[..., LaunchSpec]


async def failure_of(spec: LaunchSpec) -> EngineError:
    """Why it does not start; nothing of it may be left."""
    with pytest.raises(EngineError) as caught:
        async with launched(spec):
            pytest.fail("this vLLM takes what it should refuse")
    assert list(spec.record_dir.glob("engine-*")) == []
    return caught.value


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"block_size": 16}, "block_size", "No common block size for 16"),
        ({"max_num_seqs": "many"}, "bad_option_value", "--max-num-seqs"),
    ],
    ids=["in the engine", "in the command"],
)
async def test_a_refused_configuration(launch_spec: MakeSpec, options: dict[str, Any], code: str, words: str) -> None:
    error = await failure_of(launch_spec(**options))
    assert error.diagnosis.code == code, error.message
    assert words in error.message


async def test_a_missing_model(launch_spec: MakeSpec, tmp_path: Path) -> None:
    error = await failure_of(replace(launch_spec(), model=str(tmp_path / "nowhere")))
    assert error.diagnosis.code == "missing_model"


async def test_a_sound_configuration_is_read_back_and_ends_whole(launch_spec: MakeSpec) -> None:
    spec = launch_spec()
    async with launched(spec) as engine:
        seen = [p for p in map(identify, engine.process_ids()) if p is not None]
        port = engine.port
        assert len(seen) >= 3
        assert engine.exited() is None
        for key in ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len"):
            assert engine.effective.args[key] == spec.args[key]
        assert engine.effective.args["enable_chunked_prefill"] is True
        assert engine.effective.block_size == 32
        assert engine.effective.kv_cache_tokens == 1024 * 32
        assert engine.effective.vllm_version
    assert [p for p in seen if identify(p.pid) == p] == []
    assert port_is_free(port)


async def test_the_installed_options_are_asked(vllm_command: str) -> None:
    installed = await inspect_installed((vllm_command,), {})
    assert installed.version
    assert {"max_num_batched_tokens", "no_enable_chunked_prefill", "scheduler_cls"} <= installed.options
    with pytest.raises(EngineError, match="--scheduling-policy"):
        check_options(installed, {"scheduling_polcy": "fcfs"})
