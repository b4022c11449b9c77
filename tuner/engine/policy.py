"""What each cause of a failure means for the study: one table, in one place."""

from __future__ import annotations

from typing import Final, Literal

from tuner.domain.experiment import Diagnosis
from tuner.errors import EngineError, ProfileError

Policy = Literal["setting", "environment", "fatal", "load"]
"""`setting`: the setting is infeasible, the study goes on. `environment`: the start is made again, three times in a
study at most. `fatal`: the study stops at once. `load`: rounds could not be driven; the start is `load_failed`."""

POLICIES: Final[dict[str, Policy]] = {
    "kv_cache_too_small": "setting",
    "invalid_combination": "setting",
    "block_size": "setting",
    "cuda_oom": "setting",
    "not_as_asked": "setting",
    "no_free_memory": "environment",
    "nccl_failed": "environment",
    "rendezvous_timeout": "environment",
    "device_busy": "environment",
    "memory_profiling_failed": "environment",
    "port_in_use": "environment",
    "startup_timeout": "environment",
    "engine_died": "environment",
    "engine_stalled": "environment",
    "live_lost": "environment",
    "not_stopped": "environment",
    "unknown": "environment",
    "unknown_option": "fatal",
    "bad_option_value": "fatal",
    "weights_too_large": "fatal",
    "shm_too_small": "fatal",
    "disk_full": "fatal",
    "driver_too_old": "fatal",
    "gpu_fault": "fatal",
    "bad_token": "fatal",
    "gated_model": "fatal",
    "missing_model": "fatal",
    "unsupported_model": "fatal",
    "missing_tokenizer": "fatal",
    "unsupported_gpu": "fatal",
    "too_few_gpus": "fatal",
    "plugin_failed": "fatal",
    "auth": "fatal",
    "no_chat_template": "load",
    "not_openai": "load",
    "refused": "environment",
    "timeout": "environment",
    "http_error": "load",
    "too_many_failures": "load",
    "client_limited": "load",
    "answers_differ": "load",
    "prompts_differ": "load",
    "queue_grows": "load",
}


PROFILE_AT_FAULT: Final = frozenset({"unknown_option", "bad_option_value", "missing_model", "invalid_combination"})
"""Causes that stop a study because its profile is wrong, not because an engine or a machine failed."""


def stopped_by(diagnosis: Diagnosis) -> EngineError | ProfileError:
    """The error that ends a study for this cause; its kind decides the exit code."""
    if diagnosis.code in PROFILE_AT_FAULT:
        return ProfileError(diagnosis.message, diagnosis.hint)
    return EngineError(diagnosis)


def policy(code: str) -> Policy:
    """The policy of a cause code; a code that nobody knows is the environment's."""
    return POLICIES.get(code, "environment")
