"""Whether a profile makes sense."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.doctor.line import Line
from tuner.doctor.sense import judge_prefix, judge_profile
from tuner.domain.profile import Profile


def profile(args: dict[str, Any] | None = None, **workload: Any) -> Profile:
    load = {
        "kind": "shared-prefix",
        "system_prompt_tokens": 2048,
        "user_prompt_tokens": [32, 128],
        "output_tokens": [8, 24],
        "concurrency": 32,
        "requests": 100,
        **workload,
    }
    return Profile.model_validate(
        {
            "version": 1,
            "name": "p",
            "model": "m/x",
            "engine": {"args": {"max_num_seqs": 64, "max_model_len": 8192, **(args or {})}},
            "workload": load,
            "space": {"max_num_batched_tokens": [256, 512]},
        }
    )


def line(check: str, **changes: Any) -> Line:
    return next(found for found in judge_profile(profile(**changes), 16) if found.check == check)


def test_a_sound_profile_has_nothing_wrong() -> None:
    assert {found.status for found in judge_profile(profile(), 16)} == {"ok"}


@pytest.mark.parametrize(
    ("check", "status", "changes"),
    [
        ("options", "wrong", {"args": {"gpu_memory_utilization": 1.5}}),
        ("prefix caching", "wrong", {"args": {"enable_prefix_caching": False}}),
        ("prefix length", "wrong", {"system_prompt_tokens": 10}),
        ("prefix length", "warning", {"user_prompt_tokens": [0, 8]}),
        ("model length", "wrong", {"args": {"max_model_len": 2100}}),
        ("max_num_seqs", "warning", {"args": {"max_num_seqs": None}}),
        ("max_num_seqs", "warning", {"args": {"max_num_seqs": 8}}),
    ],
)
def test_what_is_found(check: str, status: str, changes: dict[str, Any]) -> None:
    found = line(check, **changes)
    assert found.status == status
    assert found.hint


def test_chunks_that_are_no_whole_blocks_are_named() -> None:
    found = next(f for f in judge_profile(profile(), 96) if f.check == "block size")
    assert found.status == "wrong"
    assert "256" in found.message


@pytest.mark.parametrize(
    ("prefix", "own", "status", "words"),
    [
        (2048, 32, "ok", "128 blocks"),
        (2050, 32, "ok", "the last 2 tokens are computed each time"),
        (15, 32, "wrong", "hit rate is 0"),
        (16, 0, "wrong", "hit rate is 0"),
        (32, 0, "warning", "one block of 16 fewer"),
        (40, 0, "ok", "2 blocks"),
    ],
)
def test_what_of_a_prefix_can_be_reused(prefix: int, own: int, status: str, words: str) -> None:
    found = judge_prefix("workload", prefix, own, 16)
    assert found.status == status
    assert words in found.message
