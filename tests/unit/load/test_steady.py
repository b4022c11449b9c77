"""An open loop above what the server can do has no latency to speak of; below, it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.replies import Answer, Server
from tuner.domain.observation import RequestRecord
from tuner.load.steady import queue_growth


def queue(
    rate: float,
    *,
    n: int = 200,
    service_s: Callable[[np.random.Generator], float] = lambda rng: 0.05,
    burstiness: float = 1.0,
    rate_at_end: float | None = None,
    seed: int = 0,
) -> list[RequestRecord]:
    """One server, first come first served; requests a second, as an open loop sends them."""
    rng = np.random.default_rng(seed)
    records = []
    due = free = 0.0
    for i in range(n):
        now = rate + (rate_at_end - rate) * i / n if rate_at_end is not None else rate
        due += float(rng.gamma(burstiness, 1 / (now * burstiness)))
        free = max(free, due) + service_s(rng)
        records.append(
            RequestRecord(
                i, "measured", due, due, first_token_s=free, last_token_s=free + 0.1, finished_s=free + 0.1, deltas=5,
                prompt_tokens=100,
            )
        )  # fmt: skip
    return records


def jittery(rng: np.random.Generator) -> float:
    return float(rng.lognormal(np.log(0.05) - 0.125, 0.5))


ABOVE = {
    "twice": lambda seed: queue(40, seed=seed),
    "half more": lambda seed: queue(30, seed=seed),
    "few requests": lambda seed: queue(50, n=30, seed=seed),
    "bursts": lambda seed: queue(40, burstiness=0.5, seed=seed),
    "uneven": lambda seed: queue(40, service_s=jittery, seed=seed),
}
BELOW = {
    "half": lambda seed: queue(10, seed=seed),
    "most": lambda seed: queue(14, n=400, seed=seed),
    "bursts": lambda seed: queue(8, burstiness=0.5, n=400, seed=seed),
    "uneven": lambda seed: queue(10, service_s=jittery, seed=seed),
}


@pytest.mark.parametrize("load", ABOVE)
def test_a_queue_that_grows_is_said(load: str) -> None:
    found = [queue_growth(ABOVE[load](seed)) for seed in range(20)]
    assert sum(map(bool, found)) >= 15
    said = next(filter(None, found))
    assert "the queue grew through the round" in said
    assert "workload.rate" in said


@pytest.mark.parametrize("load", BELOW)
def test_a_steady_state_is_left_alone(load: str) -> None:
    assert sum(bool(queue_growth(BELOW[load](seed))) for seed in range(20)) <= 1


def test_a_trace_that_grows_itself_is_no_queue() -> None:
    assert queue_growth(queue(4, rate_at_end=40, n=300)) == ""


def test_too_few_requests_show_no_trend() -> None:
    assert queue_growth(queue(60, n=19)) == ""


def test_a_round_above_capacity_is_discarded_and_a_closed_loop_never_is() -> None:
    """Each answer is later than the one before."""

    def later(answer: Answer) -> Answer:
        return replace(answer, events=[(at_s + 0.02 * answer.number, data) for at_s, data in answer.events])

    got = Server(rate=20, fault=later).round()
    assert got.discard_code == "queue_grows"
    assert "TTFT P50 of its quarters was" in got.discarded
    assert Server(fault=later).round().discard_code == ""
