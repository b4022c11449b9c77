"""Whether the client kept up is decided from what it noted, and only that."""

from __future__ import annotations

import pytest

from tuner.domain.observation import RequestRecord
from tuner.load.keeping_up import client_stats, loop_lags_ms, mean_in_flight


def records(count: int = 100, *, late_s: float = 0.0, ttft_s: float = 0.05) -> list[RequestRecord]:
    return [
        RequestRecord(
            index=i,
            phase="measured",
            intended_s=float(i),
            sent_s=i + late_s,
            first_token_s=i + late_s + ttft_s,
            last_token_s=i + 0.2,
            finished_s=i + 0.2,
        )
        for i in range(count)
    ]


def stats(found: list[RequestRecord], lags_ms: list[float], busy: float | None = 8.0) -> str:
    return client_stats(found, lags_ms, max_in_flight=8, asked_in_flight=8, busy_in_flight=busy).limited_reason


def test_a_client_that_kept_up_is_not_limited() -> None:
    assert stats(records(), [0.3] * 500) == ""


def test_late_sends_are_a_limit() -> None:
    assert "late" in stats(records(late_s=0.1), [0.3] * 500)


def test_what_is_late_is_relative_to_what_is_measured() -> None:
    assert stats(records(late_s=0.1, ttft_s=2.0), [0.3] * 500) == ""


def test_a_loop_that_lags_is_a_limit() -> None:
    assert "lagged" in stats(records(), [0.3] * 480 + [90.0] * 20)
    assert "on average" in stats(records(), [15.0] * 500)


def test_too_few_in_flight_is_a_limit() -> None:
    assert "8 were asked for" in stats(records(), [0.3] * 500, busy=7.0)


@pytest.mark.parametrize("blocked_s", [0.05, 0.2, 1.0])
def test_a_blocked_loop_counts_for_all_the_time_it_was_blocked(blocked_s: float) -> None:
    """One tick is late; an event at any moment of the block would have been too."""
    lags = loop_lags_ms([0.0] * 100 + [blocked_s], 0.005)
    assert len(lags) == pytest.approx(100 + blocked_s / 0.005, abs=2)
    assert max(lags) == pytest.approx(blocked_s * 1e3)
    assert sum(lags) / 1e3 * 0.005 == pytest.approx(blocked_s**2 / 2, rel=0.15)


def test_ticks_that_came_early_are_not_late() -> None:
    assert loop_lags_ms([-0.001, 0.0], 0.005) == [0.0, 0.0]


def test_mean_in_flight() -> None:
    assert mean_in_flight([(0, 10), (5, 10)], 0, 10) == 1.5
    assert mean_in_flight([(0, 20)], 5, 10) == 1.0
    assert mean_in_flight([], 5, 5) is None


def test_nothing_sent_says_nothing() -> None:
    found = client_stats([], [], max_in_flight=0, asked_in_flight=None, busy_in_flight=None)
    assert found.late_sends_p99_ms is None
    assert not found.limited
