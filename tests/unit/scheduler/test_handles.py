"""The start-up check against stand-ins: what is missing is named in one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.scheduler.handles import (
    HandleError,
    LiveHandleError,
    check_classes,
    check_live,
    check_scheduler,
    supports_budget,
    supports_live,
    switchable,
)


class Scheduler:
    def schedule(self, throttle_prefills: bool = False) -> None: ...

    def add_request(self, request: Any) -> None: ...

    def finish_requests(self, request_ids: Any, finished_status: Any) -> None: ...

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        return num_new_tokens


class Request:
    def __init__(self) -> None:
        self.request_id = ""
        self.status = 0
        self.block_hashes: list[bytes] = []
        self.is_prefill_chunk = self.skip_reading_prefix_cache = False
        self.num_computed_tokens = self.num_preemptions = self.num_prompt_tokens = 0


class Block:
    def __init__(self, ref_cnt: int = 0, _block_hash: bytes | None = None, next_free_block: Any = None) -> None: ...


def built(**changes: Any) -> SimpleNamespace:
    queue = SimpleNamespace(
        append=None, remove=None, num_free_blocks=0, fake_free_list_head=SimpleNamespace(next_free_block=None)
    )
    pool = SimpleNamespace(
        cached_block_hash_to_block=SimpleNamespace(get_one_block=None),
        free_block_queue=queue,
        get_usage=None,
        num_gpu_blocks=1,
    )
    return SimpleNamespace(
        **{
            "block_size": 16,
            "kv_cache_manager": SimpleNamespace(block_pool=pool),
            "kv_holding_waiting": [],
            "max_num_active_reqs": 1,
            "max_num_scheduled_tokens": 1,
            "num_waiting_for_streaming_input": 0,
            "requests": {},
            "running": [],
            "scheduler_config": SimpleNamespace(long_prefill_token_threshold=0),
            "waiting": SimpleNamespace(prepend_requests=None, remove_requests=None),
            "kv_cache_config": SimpleNamespace(kv_cache_groups=[0]),
        }
        | changes
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1", "0.33.0"])
def test_a_vllm_with_everything_passes(version: str) -> None:
    check_classes(version, Scheduler, Request, Block)
    check_scheduler(built())


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "dev"])
def test_another_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(HandleError, match=version) as refused:
        check_classes(version, Scheduler, Request, Block)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["schedule", "add_request", "finish_requests", "update_from_output", "_reserve_prefill_lookahead"]
)
def test_a_missing_method_is_named(name: str) -> None:
    methods = {key: value for key, value in vars(Scheduler).items() if key != name and not key.startswith("__")}
    with pytest.raises(HandleError, match=name):
        check_classes("0.32.0", type("Scheduler", (), methods), Request, Block)


def test_a_method_with_other_parameters_is_named_with_them() -> None:
    class Changed(Scheduler):
        def finish_requests(self, ids: Any, status: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(HandleError, match=r"Changed.finish_requests takes \(ids, status\)"):
        check_classes("0.32.0", Changed, Request, Block)


def test_a_request_or_block_without_a_field_is_named() -> None:
    class Bare:
        def __init__(self) -> None:
            self.request_id = ""

    with pytest.raises(HandleError, match="Bare has no block_hashes"):
        check_classes("0.32.0", Scheduler, Bare, Block)
    with pytest.raises(HandleError, match="Bare has no _block_hash"):
        check_classes("0.32.0", Scheduler, Request, Bare)


def test_a_missing_handle_is_named_with_its_path() -> None:
    with pytest.raises(HandleError, match=r"no kv_cache_manager\.block_pool"):
        check_scheduler(built(kv_cache_manager=SimpleNamespace()))
    with pytest.raises(HandleError, match=r"no waiting\.prepend_requests"):
        check_scheduler(built(waiting=SimpleNamespace(remove_requests=None)))


@pytest.mark.parametrize("groups", [0, 2])
def test_a_model_with_several_kinds_of_cache_is_refused(groups: int) -> None:
    with pytest.raises(HandleError, match=f"this model has {groups}"):
        check_scheduler(built(kv_cache_config=SimpleNamespace(kv_cache_groups=[0] * groups)))


class Stepping:
    """Reads its limits anew in each step, as vLLM 0.32 does."""

    def schedule(self) -> Any:
        me: Any = self
        config = me.scheduler_config
        limits = (me.max_num_scheduled_tokens, config.max_num_batched_tokens, config.long_prefill_token_threshold)
        switches = (me.adaptive_long_prefill_threshold, me.scheduler_reserve_full_isl, config.enable_chunked_prefill)
        return limits, switches, me.max_num_active_reqs


class Older:
    """Reads fewer of them in a step."""

    def schedule(self) -> Any:
        me: Any = self
        config = me.scheduler_config
        return (
            me.max_num_scheduled_tokens,
            config.max_num_batched_tokens,
            config.long_prefill_token_threshold,
            config.enable_chunked_prefill,
        )


class Blocks:
    def allocate_slots(self) -> Any:
        me: Any = self
        return me.watermark_blocks


def test_what_a_step_reads_can_be_switched() -> None:
    assert set(switchable("0.32.0", Stepping, Blocks)) == {
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_chunked_prefill",
        "scheduler_reserve_full_isl",
        "watermark",
        "max_num_active_seqs",
    }
    assert set(switchable("0.30.1", Older, object)) == {
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "enable_chunked_prefill",
    }


def test_a_scheduler_that_keeps_its_limits_from_the_start_is_refused_in_one_line() -> None:
    with pytest.raises(LiveHandleError, match=r"Scheduler\.schedule does not read max_num_batched_tokens") as refused:
        switchable("0.32.0", Scheduler, Blocks)
    assert "\n" not in str(refused.value)
    assert "--no-live" in str(refused.value)
    with pytest.raises(LiveHandleError, match=r"0\.29\.0"):
        switchable("0.29.0", Stepping, Blocks)


def test_a_missing_handle_of_live_control_is_named_with_its_path() -> None:
    with pytest.raises(LiveHandleError, match=r"no kv_cache_manager\.coordinator"):
        check_live(built(kv_cache_config=SimpleNamespace(num_blocks=1)))


@pytest.mark.parametrize(
    ("version", "live", "budget"),
    [
        ("0.33.0", True, True),
        ("0.32.0+cpu", True, True),
        ("0.31.2", True, False),
        ("0.30.0", True, False),
        ("0.29.1", False, False),
        ("0.34.0.dev1", True, False),
        ("1.0", True, False),
        ("main", False, False),
        (None, False, False),
    ],
)
def test_a_version_says_before_the_start_what_it_can_do(version: str | None, live: bool, budget: bool) -> None:
    assert (supports_live(version) == "") == live
    assert (supports_budget(version) == "") == budget
    if version and version[0].isdigit() and not live:
        assert version in supports_live(version)


def test_the_class_is_only_loaded_when_asked_for() -> None:
    import tuner.scheduler

    assert "vllm" not in sys.modules
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = tuner.scheduler.Other
