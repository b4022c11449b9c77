"""A side that answers less of what was asked is never better."""

from __future__ import annotations

from tuner.domain.measurement import Measurement
from tuner.regress.limits import count_failures
from tuner.regress.verdict import MetricVerdict

IMPROVED = {"ttft_ms.p90": MetricVerdict("ttft_ms.p90", True, "improved", 100.0, 60.0)}
REGRESSED = {"ttft_ms.p90": MetricVerdict("ttft_ms.p90", True, "regressed", 60.0, 100.0)}


def starts(share: float | None) -> list[list[Measurement]]:
    return [[Measurement(requests=10, failed_requests=0, answered_share=share)] * 2]


def word(metrics: dict[str, MetricVerdict], then: float | None, now: float | None) -> str:
    judged = count_failures(metrics, starts(then), starts(now), sides=("A", "B"), other="inconclusive")
    return judged["ttft_ms.p90"].verdict


def test_faster_because_it_answers_less_is_not_improved() -> None:
    assert word(IMPROVED, 1.0, 0.5) == "inconclusive"
    assert word(IMPROVED, 1.0, 0.99) == "improved"
    assert word(IMPROVED, None, 0.5) == "improved"


def test_slower_than_a_side_that_answers_less_is_not_regressed() -> None:
    assert word(REGRESSED, 0.5, 1.0) == "inconclusive"
    assert word(REGRESSED, 1.0, 1.0) == "regressed"
