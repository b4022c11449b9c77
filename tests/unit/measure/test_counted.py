"""What we sent against what the server counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.replies import Answer, Server, counted, honest, measured
from tuner.domain.observation import CounterDelta
from tuner.measure.counted import not_ours

COUNTS = ("prefix_hit_rate", "engine_steps", "preemptions", "kv_cache_usage_peak")


def test_the_counters_of_our_own_requests_are_taken_over() -> None:
    found = measured(Server().round())
    assert found.engine_steps == 400
    assert found.prefix_hit_rate == pytest.approx(0.8 * 43 / 44)
    assert "prefix_hit_rate" not in found.derived
    assert not any("others use it" in w for w in found.warnings)


STRANGERS = {
    "others use the server": ({"requests_finished": 312.0, "prefix_hit_rate": 0.065}, "finished 312 requests"),
    "one more than ours": ({"requests_finished": 45.0}, "finished 45 requests meanwhile, we sent 44"),
    "two replicas take turns": ({"requests_finished": 22.0}, "several servers stand behind this address"),
    "another server's counters": ({"requests_finished": 0.0}, "its counters are another's"),
    "a long request beside ours": ({"requests_left": 1.0}, "1 request still ran or waited"),
    "a queue beside ours": ({"requests_left": 17.0}, "17 requests still ran or waited"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_counters_that_are_not_ours_are_null_and_the_hit_rate_is_our_requests_own(case: str) -> None:
    changes, says = STRANGERS[case]
    got = Server().round()
    found = measured(got, replace(counted(got), **changes, plugin={"prefill_chunks": 900.0, "prefills": 300.0}))
    for name in COUNTS[1:]:
        assert getattr(found, name) is None
        assert says in found.unmeasured[name]
    assert found.prefix_hit_rate == pytest.approx(0.8)
    assert says in found.derived["prefix_hit_rate"]
    assert found.plugin == {}
    assert found.kv_cache_tokens == 20_480
    assert any(says in w for w in found.warnings)


def test_without_cached_tokens_the_hit_rate_is_null_too() -> None:
    server = Server(answer=lambda number, planned, cached: honest(number, planned, cached=None))
    plan = replace(server.plan(), reports_cached_tokens=False)
    got = server.round(plan)
    found = measured(got, replace(counted(got), requests_finished=900.0))
    assert found.prefix_hit_rate is None
    assert "others use it" in found.unmeasured["prefix_hit_rate"]


@pytest.mark.parametrize("finished", [40.0, 44.0])
def test_failed_requests_may_be_counted_or_not(finished: float) -> None:
    def fault(answer: Answer) -> Answer:
        return replace(answer, failure=("cut", "lost")) if answer.number % 11 == 5 else answer

    got = Server(fault=fault).round()
    assert sum(not r.ok for r in got.records) == 4
    assert not_ours(got.records, CounterDelta(requests_finished=finished, requests_left=4.0)) == ""


@pytest.mark.parametrize("finished", [44.0, 176.0])
def test_several_answers_count_once_or_each(finished: float) -> None:
    records = [replace(r, choices=4) for r in Server().round().records]
    assert not_ours(records, CounterDelta(requests_finished=finished)) == ""
    assert not_ours(records, CounterDelta(requests_finished=177.0)) != ""


def test_a_server_that_counts_no_requests_is_believed() -> None:
    assert not_ours(Server().round().records, CounterDelta(engine_steps=3.0)) == ""
