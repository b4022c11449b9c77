"""Rounds of our own making."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tuner.domain.measurement import Measurement
from tuner.domain.observation import (
    ClientStats,
    CounterDelta,
    MemoryBreakdown,
    MemoryTimeline,
    RequestRecord,
    RoundObservation,
)
from tuner.domain.profile import Constraint
from tuner.measure import measure_round


def request(index: int, ttft_ms: float, gaps_ms: Sequence[float] = (20.0, 20.0), **more: object) -> RequestRecord:
    sent_s = 100.0 + index * 0.02
    first_s = sent_s + ttft_ms / 1e3
    last_s = first_s + sum(gaps_ms) / 1e3
    values = {
        "phase": "measured",
        "first_answer_s": first_s,
        "deltas": len(gaps_ms) + 1,
        "prompt_tokens": 2100,
        "output_tokens": len(gaps_ms) + 1,
        "cached_tokens": 2048,
        **more,
    }
    return RequestRecord(
        index=index,
        intended_s=sent_s,
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=last_s,
        finished_s=last_s,
        token_gaps_ms=list(gaps_ms),
        **values,
    )


def failure(index: int, error: str = "no token") -> RequestRecord:
    sent_s = 100.0 + index * 0.02
    return RequestRecord(index, "measured", sent_s, sent_s, finished_s=sent_s + 0.1, error=error, error_code="no_token")


def observe(records: list[RequestRecord], *, concurrency: int | None = 32, **more: object) -> RoundObservation:
    client = ClientStats(0.1, concurrency or 7, concurrency, 0.1, False)
    counted = [r for r in records if r.phase == "measured"]
    return RoundObservation(
        records=records,
        client=client,
        started_s=100.0,
        measured_from_s=min((r.sent_s for r in counted), default=100.0),
        measured_to_s=max((r.finished_s or r.sent_s for r in counted), default=100.0),
        **more,
    )


def natural(seed: int, *, scale: float = 1.0, n: int = 200, spread: float = 0.3) -> RoundObservation:
    """A closed loop of 32 whose TTFT is log-normal around 80 ms, with answers of 8 to 24 tokens."""
    rng = np.random.default_rng(seed)
    ttfts = rng.lognormal(np.log(80), spread, n + 32) * scale
    records = []
    for index, ttft in enumerate(ttfts):
        gaps = rng.normal(20, 2, int(rng.integers(7, 24))).tolist()
        records.append(request(index, float(ttft), gaps, phase="cold" if index < 32 else "measured"))
    return observe(records)


def measure(
    observation: RoundObservation,
    *limits: str,
    counters: CounterDelta | None = None,
    memory: MemoryTimeline | None = None,
    breakdown: MemoryBreakdown | None = None,
    block_size: int | None = None,
    **more: int,
) -> Measurement:
    return measure_round(
        observation,
        counters or CounterDelta(),
        memory or MemoryTimeline("unavailable", [], {}, "not asked for"),
        breakdown or MemoryBreakdown(),
        [Constraint.parse(limit) for limit in limits],
        block_size=block_size,
        **more,
    )


class Making:
    """The functions above, for tests."""

    request: Callable[..., RequestRecord] = staticmethod(request)
    failure: Callable[..., RequestRecord] = staticmethod(failure)
    observe: Callable[..., RoundObservation] = staticmethod(observe)
    natural: Callable[..., RoundObservation] = staticmethod(natural)
    measure: Callable[..., Measurement] = staticmethod(measure)


@pytest.fixture
def make() -> Making:
    return Making()
