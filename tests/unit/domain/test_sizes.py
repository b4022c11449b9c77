"""Sizes are read as vLLM reads them, wherever a number of tokens stands."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tuner.domain.profile import KnobRange, Profile
from tuner.domain.units import parse_size, sized
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, TraceWorkload, WorkloadClass


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2048", 2048),
        (" 2048 ", 2048),
        ("1k", 1000),
        ("1K", 1024),
        ("64K", 65536),
        ("25.6k", 25600),
        ("2m", 2_000_000),
        ("2M", 2 * 1024**2),
        ("4g", 4 * 10**9),
        ("4G", 4 * 1024**3),
        ("1t", 10**12),
        ("1T", 1024**4),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "auto", "-1", "2.5", "2.5K", "1 k", "1kk", "0x10", "1e3", "fp8"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


@pytest.mark.parametrize(
    ("option", "given", "read"),
    [
        ("max_num_batched_tokens", "64K", 65536),
        ("max_num_batched_tokens", ["1k", 2048, "4K"], [1000, 2048, 4096]),
        ("max_num_batched_tokens", {"low": "1K", "high": "8K", "log": True}, {"low": 1024, "high": 8192, "log": True}),
        ("max_model_len", "auto", "auto"),
        ("kv_cache_memory_bytes", "4G", 4 * 1024**3),
        ("num_gpu_blocks_override", "1k", 1000),
        ("served_model_name", "7g", "7g"),
        ("revision", "1k", "1k"),
        ("enforce_eager", True, True),
    ],
)
def test_options_that_are_sizes_become_numbers(option: str, given: Any, read: Any) -> None:
    assert sized(option, given) == read


def test_lengths_of_a_load_may_be_sizes() -> None:
    load = SharedPrefixWorkload.model_validate(
        {
            "system_prompt_tokens": "2K",
            "user_prompt_tokens": ["32", "1k"],
            "output_tokens": 8,
            "concurrency": 1,
            "requests": 1,
        }
    )
    assert (load.system_prompt_tokens, load.user_prompt_tokens) == ((2048, 2048), (32, 1000))
    trace = TraceWorkload.model_validate({"path": "t", "requests": 1, "block_tokens": "1K", "max_input_tokens": "64k"})
    assert (trace.block_tokens, trace.max_input_tokens) == (1024, 64_000)
    with pytest.raises(ValidationError, match="is no size"):
        TraceWorkload.model_validate({"path": "t", "requests": 1, "block_tokens": "1Q"})


@pytest.mark.parametrize("metric", ["itl_ms.p99", "tpot_ms.p50"])
def test_one_token_shows_no_time_between_tokens(metric: str) -> None:
    def mixed(*outputs: int) -> MixedWorkload:
        classes = [WorkloadClass(name=f"c{i}", user_prompt_tokens=8, output_tokens=n) for i, n in enumerate(outputs)]
        return MixedWorkload(concurrency=1, requests=1, classes=classes)

    assert "every answer has one token" in mixed(1, 1).cannot_measure(metric)
    assert mixed(1, 2).cannot_measure(metric) == ""
    assert mixed(1, 1).cannot_measure("ttft_ms.p90") == ""
    assert mixed(1, 1).cannot_measure("e2e_ms.p90") == ""


def profile(**more: Any) -> Profile:
    load = {"kind": "shared-prefix", "system_prompt_tokens": 64, "user_prompt_tokens": 8, "output_tokens": 8}
    given: dict[str, Any] = {
        "version": 1,
        "name": "p",
        "model": "m",
        "workload": {**load, "concurrency": 1, "requests": 1, **more.pop("workload", {})},
        "space": {"max_num_batched_tokens": [512]},
    }
    return Profile.model_validate({**given, **more})


def test_sizes_of_a_profile_are_numbers_everywhere() -> None:
    found = profile(
        engine={"args": {"max_num_batched_tokens": "64K", "max_model_len": "auto", "served_model_name": "1k"}},
        space={
            "max_num_batched_tokens": ["1k", "2K"],
            "max_num_seqs": {"low": "16", "high": "1K"},
            "reuse_budget": {"max_cached_blocks": [0, "1K"]},
        },
    )
    assert found.engine.args == {
        "max_num_batched_tokens": 65536,
        "max_model_len": "auto",
        "served_model_name": "1k",
    }
    assert found.space.knobs["max_num_batched_tokens"] == [1000, 2048]
    assert found.space.knobs["max_num_seqs"] == KnobRange(low=16, high=1024)
    assert found.space.reuse_budget == {"max_cached_blocks": [0, 1024]}


@pytest.mark.parametrize(
    "asked",
    [
        {"constraints": ["itl_ms.p99 <= 120"]},
        {"objective": {"minimize": "tpot_ms.p50"}},
        {"regress_metrics": ["itl_ms.mean"]},
    ],
)
def test_a_profile_that_asks_for_what_its_load_cannot_show_is_refused(asked: dict[str, Any]) -> None:
    assert profile(**asked)
    with pytest.raises(ValidationError, match=r"cannot be measured with this load.*at least two output tokens"):
        profile(workload={"output_tokens": 1}, **asked)
    assert profile(workload={"output_tokens": 1}, constraints=["e2e_ms.p99 <= 120"])
