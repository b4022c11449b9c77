"""The hierarchical spread: starts and rounds separated, and a prior that is dropped."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from tuner.regress.spread import (
    RUNS_NEEDED,
    Group,
    Prior,
    estimate_spread,
    group_of,
    run_variance,
    t_quantile,
    upper_tail,
)

NO_PRIOR = Prior(start_dof=0.0, round_dof=0.0, conflict=0.0)


def drawn(rng: random.Random, starts: int, rounds: int, start_sd: float, round_sd: float) -> list[list[float]]:
    return [
        [100 * math.exp(own + rng.gauss(0, round_sd)) for _ in range(rounds)]
        for own in (rng.gauss(0, start_sd) for _ in range(starts))
    ]


def test_the_spread_of_starts_and_of_rounds_are_separated() -> None:
    group = group_of(drawn(random.Random(1), 4000, 3, 0.05, 0.02))
    assert group is not None
    spread = estimate_spread([group], NO_PRIOR)
    assert spread.start_sd == pytest.approx(0.05, rel=0.05)
    assert spread.round_sd == pytest.approx(0.02, rel=0.05)
    assert spread.mean_sd == pytest.approx(math.hypot(0.05, 0.02 / math.sqrt(3)), rel=0.05)


def test_a_shift_between_occasions_is_no_spread() -> None:
    rng = random.Random(2)
    then = group_of(drawn(rng, 50, 3, 0.03, 0.02))
    now = group_of([[v * 1.5 for v in start] for start in drawn(rng, 50, 3, 0.03, 0.02)])
    assert then is not None
    assert now is not None
    assert estimate_spread([then, now], NO_PRIOR).start_sd == pytest.approx(0.03, rel=0.25)


def test_a_single_start_leaves_the_spread_to_the_prior() -> None:
    group = group_of([[100.0, 101.0, 99.0]])
    assert group is not None
    spread = estimate_spread([group, group], Prior())
    assert spread.dof == Prior().start_dof
    assert spread.start_sd == pytest.approx(Prior().start_sd, rel=0.05)


def test_the_prior_is_dropped_for_starts_that_differ_far_more() -> None:
    group = group_of([[90.0], [115.0], [90.0], [115.0]])
    assert group is not None
    spread = estimate_spread([group], Prior())
    assert not spread.prior_kept
    assert spread.mean_sd > 0.1


def test_many_equal_starts_make_the_spread_smaller_than_the_prior() -> None:
    group = group_of([[100.0, 100.1, 99.9]] * 60)
    assert group is not None
    assert estimate_spread([group], Prior()).mean_sd < Prior().start_sd


def test_more_starts_make_a_difference_surer() -> None:
    few, many = group_of([[100.0]] * 3), group_of([[100.0]] * 12)
    assert few is not None
    assert many is not None
    spread = estimate_spread([few, many], Prior())
    assert spread.difference_sd(many, many) == pytest.approx(spread.difference_sd(few, few) / 2)


def test_empty_starts_are_left_out_and_nothing_is_nothing() -> None:
    group = group_of([[], [1.0, 2.0]])
    assert group is not None
    assert group.starts == 1
    assert group_of([[], []]) is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_value_without_a_logarithm_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        group_of([[1.0, value]])


def test_student() -> None:
    assert t_quantile(0.975, 10) == pytest.approx(2.228, abs=1e-3)
    assert upper_tail(2.228, 10) == pytest.approx(0.025, abs=1e-4)
    assert upper_tail(-1.0, 5) == pytest.approx(1 - upper_tail(1.0, 5))


def runs(rng: random.Random, count: int, run_sd: float) -> list[Group]:
    found = []
    for _ in range(count):
        factor = math.exp(rng.gauss(0, run_sd))
        group = group_of([[v * factor for v in start] for start in drawn(rng, 3, 3, 0.01, 0.01)])
        assert group is not None
        found.append(group)
    return found


def test_runs_that_differ_among_themselves_are_noticed() -> None:
    groups = runs(random.Random(3), 40, 0.05)
    assert math.sqrt(run_variance(groups, estimate_spread(groups, NO_PRIOR))) == pytest.approx(0.05, rel=0.3)


def test_runs_that_do_not_differ_cost_nothing() -> None:
    groups = runs(random.Random(4), 40, 0.0)
    assert run_variance(groups, estimate_spread(groups, NO_PRIOR)) == 0.0


def test_a_few_runs_cannot_tell() -> None:
    groups = runs(random.Random(5), RUNS_NEEDED - 1, 0.2)
    assert run_variance(groups, estimate_spread(groups, NO_PRIOR)) == 0.0


def test_differing_runs_widen_a_comparison() -> None:
    groups = runs(random.Random(6), 20, 0.05)
    spread = estimate_spread(groups, NO_PRIOR)
    wider = dataclasses.replace(spread, run_var=run_variance(groups, spread))
    assert wider.difference_sd(groups[0], groups[1]) > 2 * spread.difference_sd(groups[0], groups[1])
    assert wider.difference_sd(groups[0], groups[1], 2) < wider.difference_sd(groups[0], groups[1])
