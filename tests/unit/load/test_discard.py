"""When a round cannot count."""

from __future__ import annotations

import pytest

from tuner.domain.observation import RequestRecord
from tuner.load.discard import discard_code, discard_reason, warm_start
from tuner.load.plan import Arrivals, PlannedRequest, RoundPlan

PLAN = RoundPlan("k", "/v1/completions", (Arrivals(lambda i: PlannedRequest(b"", 1, 1), 1, 1),))
WARM_UP = RoundPlan("k", "/v1/completions", PLAN.arrivals, phase="warmup", must_start_cold=False)


def one(error: str | None = None, code: str = "cut", cached: int | None = 0, sent_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        index=0,
        phase="cold",
        intended_s=0.0,
        sent_s=sent_s,
        first_token_s=None if error else 1.0,
        cached_tokens=cached,
        error=error,
        error_code=code if error else None,
    )


@pytest.mark.parametrize(("failed", "discarded"), [(0, False), (10, False), (11, True), (100, True)])
def test_more_than_a_tenth_failed(failed: int, discarded: bool) -> None:
    records = [one("broken") for _ in range(failed)] + [one() for _ in range(100 - failed)]
    assert bool(discard_reason(PLAN, records, "", None, "")) is discarded
    assert bool(discard_reason(WARM_UP, records, "", None, "")) is discarded


def test_the_failures_are_counted_by_kind_and_the_first_is_shown() -> None:
    text = discard_reason(PLAN, [one("HTTP 500: oom", "http_error"), one("x"), one("y")], "", None, "")
    assert "3 of 3" in text
    assert "2 cut" in text
    assert "HTTP 500: oom" in text


def test_a_warm_start_and_a_limited_client() -> None:
    assert "32 tokens cached" in discard_reason(PLAN, [one()], "", 32, "")
    assert "the client was the limit: slow" in discard_reason(PLAN, [one()], "", None, "slow")
    assert discard_reason(WARM_UP, [one()], "", None, "slow") == ""


def test_the_first_request_must_find_nothing() -> None:
    assert warm_start(one(cached=0), [one(cached=0)], 0) is None
    assert warm_start(one(cached=64), [one(cached=64)], 0) == 64
    assert warm_start(one(cached=None), [one(cached=None)], 0) is None
    assert warm_start(one("broken", cached=64), [], 0) is None


def test_a_burst_is_taken_in_any_order() -> None:
    assert warm_start(one(cached=64), [one(cached=64), one(cached=0)], 0) is None
    # One that was sent after the first token proves nothing.
    assert warm_start(one(cached=64), [one(cached=64), one(cached=0, sent_s=1.5)], 0) == 64


def test_what_every_prompt_begins_with_may_be_cached() -> None:
    assert warm_start(one(cached=16), [one(cached=16)], 20) is None
    assert warm_start(one(cached=32), [one(cached=32)], 20) == 32


def test_a_discarded_round_has_a_stable_code() -> None:
    fine = [one() for _ in range(9)]
    assert discard_code(fine, "engine_died", None, False) == "engine_died"
    assert discard_code([one("HTTP 401: key", "auth"), one("x")], "", None, False) == "auth"
    assert discard_code([one("HTTP 500: oom", "http_error")] * 3, "", None, False) == "http_error"
    assert discard_code([one("x"), one("y", "no_token")], "", None, False) == "too_many_failures"
    assert discard_code(fine, "", 32, True) == "warm_cache"
    assert discard_code(fine, "", None, True) == "client_limited"
