"""Messages of live control: what comes back as it was sent, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tuner.scheduler.messages import Command, Limits, MessageError, Report, budget_of, refusal

COMMAND = {"version": 1, "nonce": "n", "op": "apply", "values": {"watermark": 0.1}, "lease_s": 30}
REPORT = Report(
    nonce="n",
    engine=1,
    state="applied",
    reason="",
    applied={"max_num_batched_tokens": 512, "reuse_budget": {"min_reuse_ratio": 0.5}},
    boot={"max_num_batched_tokens": 8192},
    stock_chunk=None,
    budget_supported=False,
    budget_reason="no",
    lease_left_s=2.5,
    counters={"steps": 3},
)
LIMITS = Limits(max_num_batched_tokens=1024, max_num_seqs=16, max_model_len=800)


def test_messages_come_back_as_they_were_sent() -> None:
    command = Command("n", "apply", {"max_num_batched_tokens": 512, "reuse_budget": {"merge_below": 0.5}}, 60.0)
    assert Command.from_json(command.to_json()) == command
    assert Report.from_json(REPORT.to_json()) == REPORT


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version 2, this engine knows 1"),
        ({"op": "stop"}, "'stop'"),
        ({"nonce": ""}, "nonce"),
        ({"nonce": "x" * 65}, "nonce"),
        ({"nonce": 7}, "nonce"),
        ({"values": [1]}, "an object"),
        ({"op": "report", "lease_s": 0}, "only a command to apply has values"),
        ({"lease_s": 0}, "not 0"),
        ({"lease_s": -1}, "not -1"),
        ({"lease_s": "long"}, "not 'long'"),
        ({"lease_s": True}, "not True"),
        ({"lease_s": 1e9}, "not 1000000000.0"),
        ({"more": 1}, "lease_s, more, nonce"),
    ],
    ids=str,
)
def test_a_command_that_is_not_sound_is_refused(changes: dict[str, Any], says: str) -> None:
    assert Command.from_json(json.dumps(COMMAND).encode()).lease_s == 30.0
    with pytest.raises(MessageError, match=says) as refused:
        Command.from_json(json.dumps({**COMMAND, **changes}).encode())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"version": 1}', b"null"])
def test_what_is_not_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        Command.from_json(data)
    with pytest.raises(MessageError):
        Report.from_json(data)


@pytest.mark.parametrize(
    "changes",
    [{"state": "fine"}, {"counters": {"steps": "3"}}, {"applied": None}, {"engine": "1"}, {"lease_left_s": None}],
    ids=str,
)
def test_a_damaged_report_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="damaged"):
        Report.from_json(json.dumps({**json.loads(REPORT.to_json()), **changes}).encode())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False},
        {"long_prefill_token_threshold": 800, "long_prefill_token_threshold_adaptive": True},
        {"watermark": 0, "max_num_active_seqs": 16, "reuse_budget": None},
        {"reuse_budget": {}},
        {"reuse_budget": {"max_cached_blocks": 5}},
    ],
    ids=str,
)
def test_values_within_the_limits_are_taken(values: dict[str, Any]) -> None:
    assert refusal(values, LIMITS) == ""


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_num_batched_tokens": 1025}, "max_num_batched_tokens 1025 is above 1024, which this start is sized for"),
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens 15 is below max_num_seqs 16"),
        ({"max_num_batched_tokens": 512.0}, "max_num_batched_tokens is a whole number from 1, not 512.0"),
        (
            {"max_num_batched_tokens": 512, "enable_chunked_prefill": False},
            "without chunked prefill max_num_batched_tokens 512 has to be at least max_model_len 800",
        ),
        ({"long_prefill_token_threshold": 801}, "long_prefill_token_threshold 801 is above max_model_len 800"),
        ({"max_num_active_seqs": 17}, "max_num_active_seqs 17 is above max_num_seqs 16"),
        ({"max_num_active_seqs": 0}, "max_num_active_seqs is a whole number from 1, not 0"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill is true or false, not 1"),
        ({"watermark": -0.1}, "watermark is a number from 0 to below 1, not -0.1"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization cannot be switched live"),
        ({"reuse_budget": 3}, "reuse_budget: it is an object, not 3"),
        (
            {"reuse_budget": {"evict_above": -1}},
            "reuse_budget: evict_above must be a number from 0 to 1, not -1",
        ),
    ],
    ids=str,
)
def test_values_beyond_the_limits_are_refused_with_the_reason(values: dict[str, Any], says: str) -> None:
    assert refusal(values, LIMITS) == says


def test_no_budget_is_one_that_is_off() -> None:
    assert budget_of(None).off
    assert budget_of({}).off
    assert not budget_of({"min_reuse_ratio": 0.5}).off
