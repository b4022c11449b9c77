"""What each cause of a failure means for the study: one table, in one place."""

from __future__ import annotations

from typing import Final, Literal

Policy = Literal["candidate", "environment", "fatal", "load"]
"""`candidate`: infeasible, told to the sampler, the study goes on. `environment`: one retry on a fresh
start, then the study stops and can be continued. `fatal`: the study stops after one launch. `load`: the
round could not be driven; the trial is `load_failed`."""

POLICIES: Final[dict[str, Policy]] = {
    "kv_cache_too_small": "candidate",
    "invalid_combination": "candidate",
    "block_size": "candidate",
    "cuda_oom": "candidate",
    "not_as_asked": "candidate",
    "no_free_memory": "environment",
    "port_in_use": "environment",
    "startup_timeout": "environment",
    "engine_died": "environment",
    "engine_stalled": "environment",
    "not_stopped": "environment",
    "unknown": "environment",
    "unknown_option": "fatal",
    "bad_option_value": "fatal",
    "gated_model": "fatal",
    "missing_model": "fatal",
    "unsupported_model": "fatal",
    "missing_tokenizer": "fatal",
    "unsupported_gpu": "fatal",
    "plugin_failed": "fatal",
    "auth": "fatal",
    "no_chat_template": "load",
    "not_openai": "load",
    "refused": "environment",
    "timeout": "environment",
    "http_error": "load",
    "too_many_failures": "load",
    "client_limited": "load",
}


def policy(code: str) -> Policy:
    """The policy of a cause code; a code that nobody knows is the environment's."""
    return POLICIES.get(code, "environment")
