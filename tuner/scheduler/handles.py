"""What the plug-ins need of vLLM, none of it a public interface, and the check that it is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

KNOWN_VERSIONS = ("0.32", "0.33")
"""Releases whose scheduler the reuse budget was written against and tested with."""
FIRST_LIVE = (0, 30)
"""The first release in which live control is tried. Tested to 0.33; in a later one the start finds out whether the
scheduler still has all that is needed, and every round proves what it ran."""

_SIGNATURES = {
    "schedule": (),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "update_from_output": (),
    "_reserve_prefill_lookahead": ("request", "num_computed_tokens", "num_new_tokens"),
}
_REQUEST = (
    "block_hashes",
    "is_prefill_chunk",
    "num_computed_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "request_id",
    "skip_reading_prefix_cache",
    "status",
)
_SCHEDULER = (
    "block_size",
    "kv_cache_manager.block_pool.cached_block_hash_to_block.get_one_block",
    "kv_cache_manager.block_pool.free_block_queue.append",
    "kv_cache_manager.block_pool.free_block_queue.fake_free_list_head.next_free_block",
    "kv_cache_manager.block_pool.free_block_queue.num_free_blocks",
    "kv_cache_manager.block_pool.free_block_queue.remove",
    "kv_cache_manager.block_pool.get_usage",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_holding_waiting",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "num_waiting_for_streaming_input",
    "requests",
    "running",
    "scheduler_config.long_prefill_token_threshold",
    "waiting.prepend_requests",
    "waiting.remove_requests",
)
_BLOCK = ("_block_hash", "next_free_block", "ref_cnt")


_READ_IN_A_STEP = {
    "max_num_batched_tokens": ("max_num_scheduled_tokens", "max_num_batched_tokens"),
    "long_prefill_token_threshold": ("long_prefill_token_threshold",),
    "long_prefill_token_threshold_adaptive": ("adaptive_long_prefill_threshold",),
    "enable_chunked_prefill": ("enable_chunked_prefill",),
    "scheduler_reserve_full_isl": ("scheduler_reserve_full_isl",),
    "max_num_active_seqs": ("max_num_active_reqs",),
}
"""Live values, and the attributes from which `schedule` takes them anew each time."""
_NEEDED_LIVE = ("max_num_batched_tokens", "long_prefill_token_threshold", "enable_chunked_prefill")
_LIVE_SCHEDULER = (
    "kv_cache_config.num_blocks",
    "kv_cache_manager.coordinator.single_type_managers",
    "kv_cache_manager.usage",
    "max_num_scheduled_tokens",
    "requests",
    "reset_prefix_cache",
    "scheduler_config.max_num_batched_tokens",
    "vllm_config.max_in_flight_tokens",
    "vllm_config.parallel_config.data_parallel_index",
)


class HandleError(RuntimeError):
    """This vLLM is not one that the plug-in can serve with; one line that says what is missing."""

    feature = "the reuse budget"
    hint = "Leave out --scheduler-cls, or use a chunktune and a vLLM that go together."

    def __init__(self, what: str) -> None:
        super().__init__(f"chunktune: {self.feature} cannot run here: {what}. {self.hint}")
        self.what = what


class LiveHandleError(HandleError):
    """This vLLM's scheduler cannot be switched while it runs."""

    feature = "live control"
    hint = "Tune with --no-live, which starts an engine for each setting."


def supports_live(version: str | None) -> str:
    """Why settings of this vLLM cannot be switched while it runs; '' where that is worth a start."""
    release = _release(version)
    if release is None:
        return f"the version of vLLM is not known ({version})"
    return "" if release >= FIRST_LIVE else f"vLLM {version} is older than {'.'.join(map(str, FIRST_LIVE))}"


def supports_budget(version: str | None) -> str:
    """Why this vLLM cannot serve a reuse budget; '' where it can, unless the model has several kinds of cache."""
    release = _release(version)
    if release is None:
        return f"the version of vLLM is not known ({version})"
    if ".".join(map(str, release)) in KNOWN_VERSIONS:
        return ""
    return f"vLLM {version} is not among the tested releases {', '.join(KNOWN_VERSIONS)}"


def _release(version: str | None) -> tuple[int, int] | None:
    """Major and minor number."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return None if found is None else (int(found[1]), int(found[2]))


def check_classes(version: str, scheduler: type, request: type, block: type) -> None:
    """Raise HandleError unless these are the classes that the reuse budget was written against."""
    unknown = supports_budget(version)
    if unknown:
        raise HandleError(unknown)
    for name, wanted in _SIGNATURES.items():
        method = getattr(scheduler, name, None)
        if method is None:
            raise HandleError(f"{scheduler.__name__} has no method {name}")
        parameters = tuple(inspect.signature(method).parameters)[1:]
        if parameters[: len(wanted)] != wanted:
            raise HandleError(f"{scheduler.__name__}.{name} takes ({', '.join(parameters)})")
    set_by_init = set(inspect.unwrap(request.__init__).__code__.co_names)  # type: ignore[misc]
    for name in _REQUEST:
        if name not in set_by_init and not hasattr(request, name):
            raise HandleError(f"{request.__name__} has no {name}")
    names = set(inspect.signature(block).parameters) | set(dir(block))
    for name in _BLOCK:
        if name not in names:
            raise HandleError(f"{block.__name__} has no {name}")


def check_scheduler(scheduler: Any) -> None:
    """Raise HandleError unless the built scheduler has every handle and serves a model that the plug-in can rank."""
    for path in _SCHEDULER:
        for missing in _missing(scheduler, path):
            raise HandleError(f"the scheduler has no {missing}")
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise HandleError(f"it ranks the blocks of one KV cache group, and this model has {groups}")


def switchable(version: str, scheduler: type, kv_cache_manager: type) -> tuple[str, ...]:
    """The live values that these classes read anew in each step. LiveHandleError when that is not enough."""
    unknown = supports_live(version)
    if unknown:
        raise LiveHandleError(unknown)
    read = _names_in(scheduler, "schedule")
    found = [name for name, attributes in _READ_IN_A_STEP.items() if read.issuperset(attributes)]
    for name in _NEEDED_LIVE:
        if name not in found:
            raise LiveHandleError(f"{scheduler.__name__}.schedule does not read {name} in each step")
    if "watermark_blocks" in _names_in(kv_cache_manager, "allocate_slots"):
        found.append("watermark")
    return tuple(found)


def check_live(scheduler: Any) -> None:
    """Raise LiveHandleError unless the built scheduler has every handle that live control needs."""
    for path in _LIVE_SCHEDULER:
        for missing in _missing(scheduler, path):
            raise LiveHandleError(f"the scheduler has no {missing}")


def _names_in(cls: type, method: str) -> set[str]:
    """The attributes and globals that a method's own code names."""
    found = getattr(cls, method, None)
    return set() if found is None else set(inspect.unwrap(found).__code__.co_names)


def _missing(root: Any, path: str) -> Iterator[str]:
    at = root
    for name in path.split("."):
        if not hasattr(at, name):
            yield path
            return
        at = getattr(at, name)
