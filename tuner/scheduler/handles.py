"""What the plug-in needs of vLLM, none of it a public interface, and the check that it is there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

KNOWN_VERSIONS = ("0.32",)
"""Releases whose scheduler this plug-in was written against and tested with."""

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


class HandleError(RuntimeError):
    """This vLLM is not one that the plug-in can serve with; one line that says what is missing."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"chunktune: the reuse budget cannot run here: {what}. "
            "Leave out --scheduler-cls, or use a chunktune and a vLLM that go together."
        )


def check_classes(version: str, scheduler: type, request: type, block: type) -> None:
    """Raise HandleError unless these are the classes that the plug-in was written against."""
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release not in KNOWN_VERSIONS:
        raise HandleError(f"it knows vLLM {', '.join(KNOWN_VERSIONS)}, and this is {version}")
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


def _missing(root: Any, path: str) -> Iterator[str]:
    at = root
    for name in path.split("."):
        if not hasattr(at, name):
            yield path
            return
        at = getattr(at, name)
