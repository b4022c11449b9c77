"""Times and lengths: seeded, evenly spread, with the mean that was asked for."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.arrivals import deal, due_times_s, endless_due_s, endless_spread, spread
from tuner.load.prompting import generator

BOUNDS = st.tuples(st.integers(0, 500), st.integers(0, 500)).map(lambda b: (min(b), max(b)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_rate_and_burstiness_are_those_asked_for(burstiness: float) -> None:
    times = due_times_s(generator(1, "t"), 20.0, burstiness, 20001)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    # The squared coefficient of variation of a gamma is 1/shape; 1 for Poisson.
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_endless_times_begin_like_the_finite_ones() -> None:
    assert list(islice(endless_due_s(generator(3), 5.0, 1.0), 40)) == due_times_s(generator(3), 5.0, 1.0, 40)


@given(BOUNDS, st.integers(1, 400), st.integers(0, 9))
def test_lengths_cover_their_range_evenly(bounds: tuple[int, int], count: int, seed: int) -> None:
    low, high = bounds
    values = spread(generator(seed), bounds, count)
    assert len(values) == count
    assert low <= min(values)
    assert max(values) <= high
    share = count / (high - low + 1)
    assert all(abs(values.count(v) - share) <= 1 for v in {low, high, (low + high) // 2})
    assert sorted(values) == sorted(spread(generator(seed + 1), bounds, count))


@given(BOUNDS, st.floats(0, 1, exclude_max=True), st.integers(0, 10**6))
def test_endless_lengths_stay_inside(bounds: tuple[int, int], start: float, position: int) -> None:
    assert bounds[0] <= endless_spread(start, bounds, position) <= bounds[1]


def test_endless_lengths_cover_their_range_from_anywhere() -> None:
    for begin in (0, 1000):
        values = [endless_spread(0.3, (0, 9), i) for i in range(begin, begin + 100)]
        assert all(8 <= values.count(v) <= 12 for v in range(10))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(0, 300), st.integers(0, 9))
def test_classes_get_their_share(weights: list[float], count: int, seed: int) -> None:
    dealt = deal(generator(seed), weights, count)
    assert len(dealt) == count
    for i, weight in enumerate(weights):
        assert abs(dealt.count(i) - weight / sum(weights) * count) < 1 + 1e-6


def test_generators_differ_by_everything_they_are_named_by() -> None:
    draws = {tuple(generator(*name).integers(0, 1 << 30, 4)) for name in [(1, "a"), (1, "b"), (2, "a"), (1, "a", 0)]}
    assert len(draws) == 4
    assert list(generator(1, "a").integers(0, 99, 5)) == list(generator(1, "a").integers(0, 99, 5))
