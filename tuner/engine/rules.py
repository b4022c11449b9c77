"""What vLLM is known to refuse, found before a launch is spent on it. Pure.

The rules are those of `SchedulerConfig.verify_max_model_len` and its neighbours in vLLM 0.32; a rule only
speaks about values that were asked for, since the engine may choose the others itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.domain.experiment import Diagnosis
from tuner.domain.setting import CHUNK_KNOB, Scalar
from tuner.engine.diagnosis import cause


def static_rule_violation(args: Mapping[str, Scalar]) -> Diagnosis | None:
    """The first rule that these options break (`invalid_combination`), or None.

    A block size bounds no chunk: a hybrid model has blocks of hundreds of tokens and takes any.
    """
    chunk = _number(args, CHUNK_KNOB)
    seqs = _number(args, "max_num_seqs")
    length = _number(args, "max_model_len")
    active = _number(args, "max_num_active_seqs")
    threshold = _number(args, "long_prefill_token_threshold")
    share = _number(args, "gpu_memory_utilization")
    chunked = args.get("enable_chunked_prefill") is not False
    for name, value in ((CHUNK_KNOB, chunk), ("max_num_seqs", seqs), ("max_model_len", length)):
        if value is not None and value < 1 and not (name == "max_model_len" and value == -1):
            return _broken(f"{name} ({value:g}) has to be at least 1")
    if share is not None and not 0 < share <= 1:
        return _broken(f"gpu_memory_utilization ({share:g}) has to be above 0 and at most 1")
    if chunk is not None and seqs is not None and chunk < seqs:
        return _broken(f"{CHUNK_KNOB} ({chunk:g}) has to be at least max_num_seqs ({seqs:g})")
    if chunk is not None and length is not None and not chunked and chunk < length:
        return _broken(
            f"without chunked prefill {CHUNK_KNOB} ({chunk:g}) has to be at least max_model_len ({length:g})"
        )
    if active is not None and seqs is not None and active > seqs:
        return _broken(f"max_num_active_seqs ({active:g}) has to be at most max_num_seqs ({seqs:g})")
    if threshold is not None and length is not None and 0 < length < threshold:
        return _broken(f"long_prefill_token_threshold ({threshold:g}) has to be at most max_model_len ({length:g})")
    return None


def _number(args: Mapping[str, Scalar], key: str) -> float | None:
    value = args.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _broken(rule: str) -> Diagnosis:
    return cause("invalid_combination", rule)
