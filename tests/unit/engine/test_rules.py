"""Impossible combinations, refused before a launch."""

from __future__ import annotations

import pytest

from tuner.domain.setting import Scalar
from tuner.engine.rules import static_rule_violation

Args = dict[str, Scalar]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "max_num_seqs (128)"),
        (
            {"max_num_batched_tokens": 512, "max_model_len": 8192, "enable_chunked_prefill": False},
            "without chunked prefill",
        ),
        ({"max_num_active_seqs": 9, "max_num_seqs": 8}, "max_num_active_seqs (9)"),
        ({"long_prefill_token_threshold": 9000, "max_model_len": 8192}, "long_prefill_token_threshold (9000)"),
        ({"max_num_batched_tokens": 0}, "at least 1"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization (1.2)"),
    ],
)
def test_refused(args: Args, words: str) -> None:
    found = static_rule_violation(args)
    assert found is not None
    assert found.code == "invalid_combination"
    assert words in found.message


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"max_num_batched_tokens": 64},  # an open max_num_seqs is lowered by vLLM itself
        {"max_num_batched_tokens": 128, "max_num_seqs": 128, "max_model_len": 8192},
        {"max_num_batched_tokens": 8192, "max_model_len": 8192, "enable_chunked_prefill": False},
        {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
        {"max_model_len": -1, "long_prefill_token_threshold": 512},
        {"max_num_seqs": True},
    ],
)
def test_allowed(args: Args) -> None:
    assert static_rule_violation(args) is None


def test_a_hybrid_models_block_bounds_no_chunk() -> None:
    assert static_rule_violation({"max_num_batched_tokens": 512, "block_size": 544}) is None
