import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.measure.notes import sample_warning
from tuner.measure.percentiles import latency, least_sample, nearest_rank, rank

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@pytest.mark.parametrize(("q", "expected"), [(0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100), (0.001, 1), (0.07, 7)])
def test_of_1_to_100_the_nearest_rank_is_the_number_itself(q: float, expected: float) -> None:
    assert nearest_rank(list(range(1, 101)), q) == expected


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_one_value_is_every_percentile(q: float) -> None:
    assert nearest_rank([7.0], q) == 7.0


@pytest.mark.parametrize("hundredth", range(1, 101))
def test_a_whole_rank_is_not_rounded_up_by_binary_fractions(hundredth: int) -> None:
    assert rank(100, hundredth / 100) == hundredth


@given(values, st.floats(0.001, 1), st.floats(0.001, 1))
def test_percentiles_are_observed_values_and_monotone(found: list[float], one: float, other: float) -> None:
    ordered = sorted(found)
    low, high = sorted((one, other))
    assert nearest_rank(ordered, low) <= nearest_rank(ordered, high)
    assert nearest_rank(ordered, low) in found


@given(values, st.floats(0.001, 1))
def test_agrees_with_the_inverted_cdf_of_numpy(found: list[float], q: float) -> None:
    exact = q * len(found)
    if not math.isclose(exact, round(exact), abs_tol=1e-6):
        assert nearest_rank(sorted(found), q) == float(np.quantile(found, q, method="inverted_cdf"))


@pytest.mark.parametrize(("n", "q"), [(0, 0.5), (5, 0.0), (5, 1.5), (5, 99)])
def test_what_has_no_percentile_is_refused(n: int, q: float) -> None:
    with pytest.raises(ValueError, match=r"share|nothing"):
        rank(n, q)


def test_nothing_has_no_distribution_rather_than_zeros() -> None:
    assert latency([]) is None


def test_a_distribution_does_not_depend_on_order() -> None:
    assert latency([3, 1, 2]) == latency([1, 2, 3])


def test_p99_takes_a_hundred_values_and_p90_ten() -> None:
    assert (least_sample(0.99), least_sample(0.9), least_sample(0.5)) == (100, 10, 2)


@pytest.mark.parametrize(("n", "warned"), [(99, "P99"), (9, "P90"), (1, "P50")])
def test_a_sample_that_cannot_carry_a_percentile_is_said(n: int, warned: str) -> None:
    note = sample_warning({"ttft_ms": latency(np.arange(1, n + 1))})
    assert note is not None
    assert f"{warned} of ttft_ms ({n})" in note


def test_a_sample_that_can_is_not() -> None:
    assert sample_warning({"ttft_ms": latency(np.arange(1, 101)), "itl_ms": None}) is None
