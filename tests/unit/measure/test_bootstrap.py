"""Redrawn requests have the spread of a real redraw, and few rounds widen an interval."""

import numpy as np
import pytest

from tuner.measure.bootstrap import redraw, stretch
from tuner.measure.percentiles import nearest_rank
from tuner.measure.samples import Sample


def test_few_rounds_stretch_the_interval_and_many_do_not() -> None:
    assert stretch(3) == pytest.approx(1.5**0.5 * 4.303 / 1.960, rel=1e-3)
    assert stretch(2) > stretch(3) > stretch(10) > 1
    assert stretch(1000) == pytest.approx(1, abs=0.01)
    assert stretch(1) == 1.0


@pytest.mark.parametrize(("statistic", "q"), [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)])
def test_a_redrawn_percentile_has_the_distribution_of_a_real_redraw(statistic: str, q: float) -> None:
    rng = np.random.default_rng(5)
    values = rng.lognormal(4, 0.3, 200)
    quick = redraw(Sample(values), statistic, 4000, rng)
    plain = np.sort(values[rng.integers(0, 200, (4000, 200))], axis=1)
    real = np.array([nearest_rank(row, q) for row in plain])
    assert np.quantile(quick, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(real, [0.1, 0.5, 0.9]), rel=0.015)
    assert set(quick) <= set(values)


def test_a_redrawn_mean_has_the_spread_of_a_real_redraw() -> None:
    rng = np.random.default_rng(6)
    values = rng.lognormal(4, 0.3, 200)
    real = values[rng.integers(0, 200, (4000, 200))].mean(axis=1)
    quick = redraw(Sample(values), "mean", 4000, rng)
    assert quick.std() == pytest.approx(real.std(), rel=0.06)
    assert quick.mean() == pytest.approx(values.mean(), rel=0.01)


@pytest.mark.parametrize("statistic", ["p50", "mean"])
def test_values_of_one_request_move_together(statistic: str) -> None:
    """40 requests of 50 gaps each; between requests the gaps differ, within one they do not."""
    rng = np.random.default_rng(7)
    values = np.repeat(rng.normal(20, 3, 40), 50)
    owners = np.repeat(np.arange(40), 50)
    together = redraw(Sample(values, owners), statistic, 2000, rng).std()
    apart = redraw(Sample(values), statistic, 2000, rng).std()
    by_request = np.sort(values.reshape(40, 50)[rng.integers(0, 40, (2000, 40))].reshape(2000, -1), axis=1)
    real = by_request.mean(axis=1) if statistic == "mean" else by_request[:, 999]
    assert together > 1.5 * apart
    assert together == pytest.approx(real.std(), rel=0.25)
