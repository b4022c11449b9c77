"""Elimination within the search: stages, simultaneous bounds, limits, the zone around stock, effects of both ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.fakes.engines_in_memory import problem
from tuner.domain.experiment import STOCK_ID, Results, Round, SettingId
from tuner.domain.measurement import Latency, Measurement
from tuner.study.estimate import Evidence
from tuner.study.problem import Problem
from tuner.study.race import Fit, Race, lower_bounds, run_race, stages, standings, with_neighbours

NAMES: tuple[SettingId, ...] = (0, 1, 2, STOCK_ID)


def rounds(
    cycles: int, value: Callable[[SettingId, int], tuple[float, float]], names: tuple[SettingId, ...] = NAMES
) -> Results:
    """TTFT P90 and ITL P99 by setting and cycle, all on start 1."""
    rows = []
    for cycle in range(cycles):
        for position, name in enumerate(names):
            p90, itl = value(name, cycle)
            measured = Measurement(
                ttft_ms=Latency(p50=p90, p90=p90, p99=p90, mean=p90, n=100),
                itl_ms=Latency(p50=itl, p90=itl, p99=itl, mean=itl, n=100),
            )
            rows.append(
                Round(
                    start=1,
                    round=len(rows) + 1,
                    cycle=cycle,
                    position=position,
                    setting=name,
                    state="kept",
                    measurement=measured,
                )
            )
    return Results(rounds=rows)


def race(asked: Problem, results: Results) -> Race:
    return run_race(Evidence(asked, results, [1]), [0, 1, 2], STOCK_ID, {0: "chunk 512"})


def noisy(levels: dict[SettingId, float], sd: float, seed: int = 0) -> Callable[[SettingId, int], tuple[float, float]]:
    random = np.random.default_rng(seed)
    return lambda name, cycle: (levels[name] * float(np.exp(random.normal(0, sd))), 20.0)


def test_stages_begin_with_the_rounds_of_the_profile() -> None:
    assert stages(3)[:4] == [3, 5, 8, 12]
    assert stages(6)[0] == 6
    assert stages(1)[0] == 2


def test_nothing_is_dropped_before_the_first_stage() -> None:
    found = race(problem(), rounds(2, noisy({0: 50, 1: 100, 2: 200, STOCK_ID: 100}, 0.01)))
    assert found.dropped == {}
    assert found.leader is None
    assert found.in_question([0, 1, 2]) == [0, 1, 2]


def test_what_is_worse_beyond_doubt_goes_and_the_best_stays_until_it_is_alone() -> None:
    found = race(problem(), rounds(3, noisy({0: 80, 1: 100, 2: 200, STOCK_ID: 100}, 0.01)))
    assert found.leader == 0
    assert set(found.dropped) == {1, 2}
    assert found.in_question([0, 1, 2]) == []
    assert found.dropped[2].startswith("at least ")
    assert found.dropped[2].endswith("%)")
    assert "worse than chunk 512 after 3 cycles" in found.dropped[2]


def test_noise_keeps_settings_in_question() -> None:
    found = race(problem(), rounds(3, noisy({0: 95, 1: 96, 2: 97, STOCK_ID: 100}, 0.08)))
    assert found.in_question([0, 1, 2]) == [0, 1, 2]


def test_two_settings_are_left_to_the_finals() -> None:
    found = race(problem(), rounds(3, noisy({0: 95, 1: 96, 2: 300, STOCK_ID: 110}, 0.08)))
    assert set(found.dropped) == {2}
    assert found.in_question([0, 1, 2]) == []


def test_a_setting_that_joined_late_runs_to_its_first_stage() -> None:
    levels: dict[SettingId, float] = {0: 80, 1: 200, 2: 81, STOCK_ID: 110}
    value = noisy(levels, 0.02)
    early = rounds(3, value, (0, 1, STOCK_ID))
    for cycles, question in ((1, [0, 2]), (2, [0, 2]), (3, [])):
        late = rounds(cycles, value, (0, 2, STOCK_ID))
        joined = [r.model_copy(update={"cycle": r.cycle + 3, "round": r.round + 100}) for r in late.rounds]
        found = race(problem(), Results(rounds=[*early.rounds, *joined]))
        assert found.in_question([0, 1, 2]) == question


def test_the_end_of_the_stages_retires_what_is_left() -> None:
    found = race(problem(), rounds(60, noisy({0: 80, 1: 80, 2: 80, STOCK_ID: 100}, 0.4)))
    assert found.in_question([0, 1, 2]) == []


def test_more_cycles_than_one_start_can_tell_are_not_measured() -> None:
    found = race(problem(), rounds(12, noisy({0: 80, 1: 80, 2: 80, STOCK_ID: 100}, 0.015)))
    assert found.in_question([0, 1, 2]) == []


def test_settings_close_to_stock_leave_the_search() -> None:
    found = race(problem(), rounds(5, noisy({0: 99, 1: 100, 2: 99.5, STOCK_ID: 100}, 0.003)))
    assert set(found.dropped) == {0, 1, 2}
    assert "at best" in found.dropped[0]
    assert "better than stock" in found.dropped[0]


def test_a_setting_far_over_a_limit_goes_whatever_its_objective() -> None:
    asked = problem(limits=("itl_ms.p99 <= 100",))

    def value(name: SettingId, cycle: int) -> tuple[float, float]:
        return {0: (50.0, 150.0), 1: (80.0, 99.0), 2: (90.0, 50.0), STOCK_ID: (100.0, 50.0)}[name]

    found = race(asked, rounds(3, value))
    assert found.dropped[0] == "unlikely to meet itl_ms.p99 <= 100"
    assert found.leader == 1


def test_a_metric_that_is_missing_counts_as_a_broken_limit() -> None:
    found = race(problem(limits=("goodput >= 1",)), rounds(3, noisy(dict.fromkeys(NAMES, 100.0), 0.01)))
    assert set(found.dropped) == {0, 1, 2}


@pytest.mark.parametrize("sd", [0.02, 0.1])
def test_the_best_is_rarely_dropped(sd: float) -> None:
    lost = 0
    for seed in range(100):
        results = rounds(30, noisy({0: 97, 1: 100, 2: 104, STOCK_ID: 110}, sd, seed))
        lost += 0 in race(problem(), results).dropped and race(problem(), results).leader != 0
    assert lost <= 10


def test_effects_of_columns_measured_in_different_rows() -> None:
    random = np.random.default_rng(1)
    rows, columns = random.normal(0, 1, 12), np.array([0.0, 1.0, 2.0, -1.0])
    table = rows[:, None] + columns
    table[:6, 3] = np.nan
    table[8:, 1] = np.nan
    fit = Fit(table)
    assert fit.effects - fit.effects[0] == pytest.approx(columns)
    assert fit.errors == pytest.approx(np.zeros(4), abs=1e-9)


def test_effects_without_common_rows_are_means() -> None:
    nan = np.nan
    fit = Fit(np.array([[1.0, nan], [3.0, nan], [nan, 5.0], [nan, nan]]))
    assert fit.effects == pytest.approx([2.0, 5.0])
    assert np.isfinite(fit.cautious).all()


def test_a_setting_measured_seldom_does_not_lead_by_luck() -> None:
    random = np.random.default_rng(0)
    table = random.normal(0, 0.1, (30, 2))
    table[:27, 1] = np.nan
    fit = Fit(table)
    assert fit.errors[1] > 2 * fit.errors[0]


def test_bounds_are_simultaneous_and_open_where_nothing_is_known() -> None:
    random = np.random.default_rng(2)
    table = random.normal(0, 0.1, (10, 8))
    table[1:, 7] = np.nan
    mean, error, low = lower_bounds(table, [1, 2, 3, 7], 0, 0.05)
    _, _, alone = lower_bounds(table, [1], 0, 0.05)
    assert low[0] < alone[0] < mean[0]
    assert (error[3], low[3]) == (np.inf, -np.inf)
    assert np.isnan(mean[3])


def test_standings_hold_costs_and_chances() -> None:
    asked = problem(limits=("itl_ms.p99 <= 100",))
    found = standings(Evidence(asked, rounds(4, noisy({0: 80, 1: 100, 2: 200, STOCK_ID: 100}, 0.01)), [1]), {})
    assert list(found) == list(NAMES)
    assert found[0].costs < found[1].costs < found[2].costs
    assert found[0].p > 0.99
    assert standings(Evidence(asked, Results(), [1]), {}) == {}


def test_noisy_values_lean_on_a_line_through_their_neighbours() -> None:
    x = np.log([1024, 1152, 1280, 1408, 8192])
    values = 0.3 * x + np.array([0.0, 0.05, 0.0, 0.0, 0.0])
    calm, _ = with_neighbours(x, values, np.full(5, 0.001))
    wild, errors = with_neighbours(x, values, np.full(5, 0.05))
    assert calm == pytest.approx(values, abs=0.001)
    assert 0.3 * x[1] < wild[1] < values[1] - 0.015
    assert errors[1] < 0.05
    assert (wild[4], errors[4]) == (values[4], 0.05)
