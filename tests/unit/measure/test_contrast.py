"""Levels and differences over starts: what they weigh, how sure they are, and how often they are wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tuner.domain.experiment import Round
from tuner.domain.measurement import Latency, Measurement
from tuner.measure.contrast import (
    PRIOR_DF,
    Estimate,
    Noise,
    Panel,
    Scale,
    difference,
    over_starts,
    round_noise,
    start_noise,
)


def row(start: int, cycle: int, setting: int | str, p90: float, *, kept: bool = True) -> Round:
    latency = Latency(p50=p90, p90=p90, p99=p90, mean=p90, n=10)
    return Round(
        start=start,
        round=cycle * 10 + int(setting != "stock"),
        cycle=cycle,
        position=0,
        setting=setting,
        state="kept" if kept else "discarded",
        measurement=Measurement(ttft_ms=latency),
    )


def test_an_estimate_gives_bounds_and_chances() -> None:
    estimate = Estimate(1.0, 0.5, 6.0)
    low, high = estimate.interval()
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 6, 1.0, 0.5))
    assert estimate.below(1.0) == pytest.approx(0.5)
    assert estimate.below(estimate.quantile(0.9)) == pytest.approx(0.9)
    assert Estimate(1.0, 0.0, 1.0).below(0.9) == 0.0
    assert Estimate(1.0, 0.0, 1.0).below(1.1) == 1.0


def test_a_start_weighs_by_how_sure_its_mean_is() -> None:
    groups = [np.full(16, 1.0), np.full(1, 3.0)]
    noisy = over_starts(groups, 0.0, rounds=Noise(1.0, 50.0), starts=Noise(0.0, 50.0))
    apart = over_starts(groups, 1.0, rounds=Noise(1e-6, 50.0), starts=Noise(1.0, 50.0))
    assert noisy is not None
    assert apart is not None
    assert noisy.value == pytest.approx((16 * 1.0 + 3.0) / 17)
    assert noisy.se == pytest.approx(17**-0.5)
    assert apart.value == pytest.approx(2.0)
    assert apart.se == pytest.approx(0.5**0.5)


def test_one_start_is_as_uncertain_as_the_prior_says() -> None:
    estimate = over_starts([np.full(50, 2.0)], 0.03)
    assert estimate is not None
    assert estimate.se == pytest.approx(0.03)
    assert estimate.df == pytest.approx(PRIOR_DF)


def test_three_starts_that_agree_are_surer_than_three_that_do_not() -> None:
    calm = over_starts([np.full(5, v) for v in (1.0, 1.001, 0.999)], 0.01)
    wild = over_starts([np.full(5, v) for v in (1.0, 1.2, 0.8)], 0.01)
    assert calm is not None
    assert wild is not None
    assert calm.df == wild.df == pytest.approx(PRIOR_DF + 2)
    assert 0 < calm.se < 0.01 < 0.05 < wild.se


def test_well_known_noise_of_rounds_brings_its_degrees_of_freedom() -> None:
    groups = [np.array([0.0, 0.2]), np.array([0.1, -0.1]), np.array([0.0, 0.1])]
    few, many = over_starts(groups, 0.001), over_starts(groups, 0.001, rounds=Noise(0.01, 100.0))
    assert few is not None
    assert many is not None
    assert many.df > few.df


def test_nothing_gives_nothing() -> None:
    assert over_starts([], 0.03) is None
    assert over_starts([np.array([])], 0.03) is None
    assert round_noise([np.array([1.0])]) is None
    assert start_noise([([np.array([1.0, 2.0])], None)]) is None


def test_what_starts_add_is_free_of_the_noise_of_rounds() -> None:
    random = np.random.default_rng(0)
    groups = [random.normal(0, 0.1, 4) for _ in range(400)]
    found = start_noise([(groups, round_noise(groups))])
    assert found is not None
    assert found.variance < 0.0015
    shifted = [g + random.normal(0, 0.2) for g in groups]
    found = start_noise([(shifted, round_noise(shifted))])
    assert found is not None
    assert math.sqrt(found.variance) == pytest.approx(0.2, rel=0.1)


def test_sides_measured_apart_add_their_errors() -> None:
    apart = difference(Estimate(3.0, 0.3, 4.0), Estimate(1.0, 0.4, 9.0))
    assert (apart.value, apart.se) == (2.0, pytest.approx(0.5))
    assert 4.0 < apart.df < 13.0


@pytest.mark.parametrize("setting_sd", [0.005, 0.01])
def test_a_bound_over_three_starts_is_wrong_as_rarely_as_it_says(setting_sd: float) -> None:
    random = np.random.default_rng(3)
    wrong = 0
    for _ in range(2000):
        starts = random.normal(0, math.sqrt(2) * setting_sd, 3)
        groups = [random.normal(shift, 0.04, 6) for shift in starts]
        estimate = over_starts(groups, math.sqrt(2) * 0.01)
        assert estimate is not None
        wrong += estimate.quantile(0.03) > 0
    assert wrong / 2000 < 0.045


@given(
    st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5),
    st.floats(0.001, 0.1),
)
def test_an_interval_is_around_its_value_and_widens_with_the_prior(values: list[list[float]], prior: float) -> None:
    groups = [np.array(v) for v in values]
    narrow, wide = over_starts(groups, prior), over_starts(groups, 3 * prior)
    assert narrow is not None
    assert wide is not None
    low, high = narrow.interval()
    assert low <= narrow.value <= high
    assert math.isfinite(low)
    assert narrow.se <= wide.se


# --- scales ---


def test_metrics_above_zero_are_compared_as_ratios() -> None:
    scale = Scale.of(np.array([[100.0, 200.0], [50.0, np.nan]]))
    assert scale.log
    assert scale.back(float(scale.to(np.array([120.0]))[0])) == pytest.approx(120.0)
    assert scale.change(math.log(1.1), math.log(100.0)) == pytest.approx(0.1)
    assert scale.limit(100.0) == pytest.approx(math.log(100.0))
    assert scale.limit(0.0) == -math.inf


def test_metrics_that_can_be_zero_are_compared_as_differences() -> None:
    scale = Scale.of(np.array([0.0, 4.0, 8.0]))
    assert not scale.log
    assert scale.back(float(scale.to(np.array([6.0]))[0])) == pytest.approx(6.0)
    assert scale.change(0.5, 1.0) == pytest.approx(0.5)
    assert scale.change(0.5, 0.0) is None
    assert Scale.of(np.array([0.0, 0.0])).unit == 1.0
    assert Scale.of(np.array([np.nan])).unit == 1.0


# --- panels ---


def test_a_panel_has_a_row_for_each_cycle_of_a_start() -> None:
    rounds = [row(1, 0, "stock", 100), row(1, 0, 3, 90), row(1, 1, 3, 91), row(2, 5, "stock", 110)]
    panel = Panel([*rounds, row(2, 5, 3, 1.0, kept=False)])
    assert panel.ids == ["stock", 3]
    assert panel.rows == [(1, 0), (1, 1), (2, 5)]
    table = panel.table("ttft_ms.p90")
    assert np.array_equal(table, [[100, 90], [np.nan, 91], [110, np.nan]], equal_nan=True)
    assert panel.present.tolist() == [[True, True], [False, True], [True, False]]
    assert [g.tolist() for g in panel.by_start(table[:, 0])] == [[100.0], [110.0]]


def test_a_metric_that_was_not_measured_is_no_number() -> None:
    panel = Panel([row(1, 0, "stock", 100)])
    assert np.isnan(panel.table("prefix_hit_rate")).all()
    assert panel.by_start(panel.table("prefix_hit_rate")[:, 0]) == []
