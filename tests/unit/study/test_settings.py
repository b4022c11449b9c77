"""Which settings a profile asks to measure."""

from typing import Any

import pytest

from tests.fakes.profiles import SMALL
from tuner.domain.experiment import Fingerprint
from tuner.domain.setting import ReuseBudget, Setting
from tuner.errors import ProfileError
from tuner.profile import parse_profile
from tuner.study.problem import Problem
from tuner.study.settings import SettingRules, expected_chunk, problem_of


def problem(*overrides: str, default_chunk: int | None = 8192, live: bool = True) -> Problem:
    return problem_of(parse_profile(SMALL, overrides=list(overrides)), default_chunk=default_chunk, live=live)


def labels(found: Problem, group: int = 0) -> set[str]:
    return {s.label for s in found.groups[group].settings}


def test_a_plain_space_is_one_group() -> None:
    found = problem("budget.trials=12", "budget.time=90m", "space.refine=false")
    assert [g.boot for g in found.groups] == [{}]
    assert labels(found) == {"chunk 128", "chunk 256", "chunk 512"}
    assert (found.max_settings, found.time_s, found.refine, found.rounds) == (12, 5400.0, False, 3)
    assert found.chunk_unit == 16
    assert problem("engine.args.block_size=32").chunk_unit == 32
    assert problem().max_settings == 64


def test_what_equals_stock_is_left_out() -> None:
    chunks = "space.max_num_batched_tokens=[128, 8192]"
    assert labels(problem(chunks)) == {"chunk 128"}
    assert labels(problem(chunks, default_chunk=None)) == {"chunk 128", "chunk 8192"}
    assert labels(problem(chunks, "engine.args.max_num_batched_tokens=128")) == {"chunk 8192"}


def test_inert_thresholds_come_once() -> None:
    found = problem("space.max_num_batched_tokens=[256, 1024]", "space.long_prefill_token_threshold=[0, 256, 512]")
    assert labels(found) == {
        "chunk 256",
        "chunk 1024",
        "chunk 1024, long_prefill_token_threshold 256",
        "chunk 1024, long_prefill_token_threshold 512",
    }


def test_a_threshold_of_the_profile_can_be_turned_off() -> None:
    found = problem(
        "space.max_num_batched_tokens=[1024]",
        "space.long_prefill_token_threshold=[0, 256, 2048]",
        "engine.args.long_prefill_token_threshold=256",
    )
    assert labels(found) == {"chunk 1024", "chunk 1024, long_prefill_token_threshold 0"}


def test_a_budget_without_admission_does_not_hold_or_yield() -> None:
    found = problem(
        "space.max_num_batched_tokens=[128]",
        "space.reuse_budget={min_reuse_ratio: [0, 0.8], max_cached_blocks: [0, 64], yield_chunk_tokens: [0, 256],"
        " max_hold_ms: [100, 1000]}",
    )
    without = [s for s in found.groups[0].settings if s.reuse_budget is None or not s.reuse_budget.min_reuse_ratio]
    assert {s.label for s in without} == {"chunk 128", "chunk 128, max_cached_blocks 64"}
    assert len(found.groups[0].settings) == 2 + 2 * 2 * 2


RULES = SettingRules({"max_num_seqs": 64}, 8192)


@pytest.mark.parametrize(
    ("knobs", "left"),
    [
        ({"long_prefill_token_threshold_adaptive": True}, {}),
        ({"long_prefill_token_threshold": 512, "long_prefill_token_threshold_adaptive": True}, None),
        ({"max_num_active_seqs": 64}, {}),
        ({"max_num_active_seqs": 32}, None),
        ({"watermark": 0, "scheduler_reserve_full_isl": True, "enable_chunked_prefill": True}, {}),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}, None),
        ({"long_prefill_token_threshold": 8192}, {}),
        ({"max_num_seqs": 64}, {}),
        ({"max_num_seqs": 32, "max_num_active_seqs": 32}, {"max_num_seqs": 32}),
    ],
)
def test_knobs_that_change_nothing_go(knobs: dict[str, Any], left: dict[str, Any] | None) -> None:
    assert RULES.reduced(Setting(knobs=knobs)).knobs == (knobs if left is None else left)


def test_merging_gives_a_large_threshold_a_meaning() -> None:
    merging = Setting(knobs={"long_prefill_token_threshold": 8192}, reuse_budget=ReuseBudget(merge_below=0.5))
    assert RULES.reduced(merging) == merging


def test_what_vllm_refuses_is_infeasible_before_any_start() -> None:
    found = problem("engine.args.max_num_seqs=256")
    assert labels(found) == {"chunk 256", "chunk 512"}
    [(setting, cause, sentence)] = found.infeasible
    assert (setting.chunk, cause) == (128, "invalid_combination")
    assert "max_num_seqs (256)" in sentence


def test_boot_knobs_make_groups_and_stocks_comes_first() -> None:
    found = problem("space.max_num_seqs=[64, 32]", "engine.args.max_num_seqs=32")
    assert [g.boot for g in found.groups] == [{}, {"max_num_seqs": 64}]
    assert labels(found) == {"chunk 128", "chunk 256", "chunk 512"}
    assert all(s.knobs["max_num_seqs"] == 64 for s in found.groups[1].settings)


def test_a_group_of_stock_alone_is_there_for_stock() -> None:
    found = problem("space.max_num_seqs=[64]")
    assert [(g.boot, len(g.settings)) for g in found.groups] == [({}, 0), ({"max_num_seqs": 64}, 3)]


def test_a_space_too_large_to_list_has_groups_only() -> None:
    wide = [f"space.reuse_budget.{n}={{low: 0, high: 1}}" for n in ("min_reuse_ratio", "merge_below", "evict_above")]
    found = problem(*wide, "space.max_num_seqs=[8, 16]")
    assert [(g.boot, g.settings) for g in found.groups] == [
        ({}, ()),
        ({"max_num_seqs": 8}, ()),
        ({"max_num_seqs": 16}, ()),
    ]
    with pytest.raises(ProfileError, match="max_num_seqs"):
        problem(*wide, "space.max_num_seqs={low: 1, high: 100, step: 1}")


@pytest.mark.parametrize(
    ("length", "live", "chunk"), [(512, True, 8192), (8192, True, 8192), (16384, True, None), (16384, False, 16384)]
)
def test_no_chunking_is_measured_where_the_model_length_allows(length: int, live: bool, chunk: int | None) -> None:
    found = problem("references=[stock, no_chunking]", f"engine.args.max_model_len={length}", live=live)
    assert [r.label for r in found.references] == ([] if chunk is None else ["no_chunking"])
    assert [r.chunk for r in found.references] == ([] if chunk is None else [chunk])


GIB = 1 << 30


@pytest.mark.parametrize(
    ("gpu", "memory", "args", "chunk"),
    [
        ("NVIDIA H100 80GB HBM3", 80 * GIB, {}, 8192),
        ("NVIDIA H200", 141 * GIB, {}, 8192),
        ("NVIDIA B200", 180 * GIB, {}, 16384),
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, {}, 2048),
        ("NVIDIA L4", 24 * GIB, {}, 2048),
        ("NVIDIA H200", 141 * GIB, {"performance_mode": "throughput"}, 16384),
        ("NVIDIA H200", 141 * GIB, {"enable_chunked_prefill": False, "max_model_len": 32768}, 32768),
        ("NVIDIA H200", 141 * GIB, {"max_num_seqs": 2, "max_model_len": 1024}, 2048),
        ("NVIDIA H200", 141 * GIB, {"enable_chunked_prefill": False}, None),
        (None, 0, {}, 2048),
        (None, 0, {"tensor_parallel_size": 2}, 4096),
    ],
)
def test_the_chunk_that_vllm_chooses_itself(gpu: str | None, memory: int, args: dict[str, Any], chunk: int) -> None:
    profile = parse_profile(SMALL, overrides=[f"engine.args.{name}={str(v).lower()}" for name, v in args.items()])
    gpus = [] if gpu is None else [{"name": gpu, "memory_bytes": memory}]
    assert expected_chunk(profile, Fingerprint(model="m", gpus=gpus, engine="vllm")) == chunk


def test_the_simulated_engine_chooses_by_its_gpu() -> None:
    fingerprint = Fingerprint(model="m", engine="sim")
    assert expected_chunk(parse_profile(SMALL), fingerprint, '{"gpu": "a100_sxm"}') == 2048
    assert expected_chunk(parse_profile(SMALL), fingerprint) == 8192
