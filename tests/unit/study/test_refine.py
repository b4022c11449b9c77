"""Which chunk sizes are worth measuring between those that were."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engines_in_memory import problem
from tuner.domain.experiment import Results, Round
from tuner.domain.measurement import Latency, Measurement
from tuner.study.estimate import Evidence
from tuner.study.refine import NEAR, Point, grid_step, new_chunks


def evidence(itl: dict[int, float], limit: str = "itl_ms.p99 <= 100") -> Evidence:
    """Settings named by their chunk, four rounds each without noise."""
    rows = []
    for cycle in range(4):
        for position, (size, level) in enumerate(itl.items()):
            latency = Latency(p50=level, p90=level, p99=level, mean=level, n=100)
            rows.append(
                Round(
                    start=1,
                    round=len(rows) + 1,
                    cycle=cycle,
                    position=position,
                    setting=size,
                    state="kept",
                    measurement=Measurement(itl_ms=latency),
                )
            )
    return Evidence(problem(limits=(limit,)), Results(rounds=rows), [1])


def family(costs: dict[int, float], p: dict[int, float] | None = None) -> list[Point]:
    return [Point(size, size, cost, (p or {}).get(size, 1.0)) for size, cost in sorted(costs.items())]


FREE = evidence({})


def test_both_neighbours_of_the_best_are_halved() -> None:
    found = new_chunks(FREE, 1024, family({256: 0.5, 512: 0.1, 1024: 0.0, 4096: 0.2, 8192: 0.3}), 16)
    assert found == [768, 2048]


def test_the_best_at_an_end_has_one_neighbour() -> None:
    assert new_chunks(FREE, 512, family({512: 0.0, 1024: 0.1}), 16) == [768]


def test_close_neighbours_are_close_enough() -> None:
    assert new_chunks(FREE, 1024, family({896: 0.01, 1024: 0.0, 1152: 0.01}), 16) == []


def test_a_neighbour_that_breaks_a_limit_is_not_halved_for_its_own_sake() -> None:
    assert new_chunks(FREE, 1024, family({1024: 0.0, 4096: 0.2}, {4096: 0.0}), 16) == []


@pytest.mark.parametrize(("unit", "size", "step"), [(16, 256, 16), (16, 512, 128), (48, 1024, 144), (32, 64, 32)])
def test_the_grid_is_a_multiple_of_the_unit(unit: int, size: int, step: int) -> None:
    assert grid_step(size, unit) == step


def test_chunks_are_looked_for_where_a_limit_binds() -> None:
    """ITL is proportional to the chunk: the limit is met at 3,333."""
    seen = evidence({2048: 61.44, 4096: 122.88})
    found = new_chunks(seen, 2048, family({2048: 0.0, 4096: -0.05}, {4096: 0.0}), 16)
    assert len(found) >= 2
    assert all(2048 < size <= 3333 and size % 128 == 0 for size in found)
    levels = {size: math.log(100 / (0.03 * size)) for size in found}
    assert max(levels.values()) > 0.06
    assert min(levels.values()) < 0.05


def test_a_limit_that_costs_the_objective_nothing_is_not_approached() -> None:
    seen = evidence({2048: 61.44, 4096: 122.88})
    assert new_chunks(seen, 2048, family({2048: 0.0, 4096: 0.3}, {4096: 0.0}), 16) == []


def test_a_limit_that_binds_small_chunks_is_approached_from_above() -> None:
    seen = evidence({1024: 150.0, 4096: 40.0})
    found = new_chunks(seen, 4096, family({1024: -0.2, 4096: 0.0}, {1024: 0.0}), 16)
    assert found
    assert all(1024 < size < 4096 for size in found)


def test_a_lower_limit_works_like_an_upper_one() -> None:
    seen = evidence({1024: 150.0, 4096: 40.0}, "itl_ms.p99 >= 100")
    found = new_chunks(seen, 1024, family({1024: 0.0, 4096: -0.2}, {4096: 0.0}), 16)
    assert found
    assert all(1024 < size < 4096 for size in found)


@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=6, unique=True),
    st.lists(st.floats(-0.3, 0.5), min_size=6, max_size=6),
    st.lists(st.floats(20, 300), min_size=6, max_size=6),
    st.integers(0, 5),
)
def test_new_chunks_lie_between_known_ones_on_the_grid(
    numbers: list[int], costs: list[float], levels: list[float], leader: int
) -> None:
    sizes = sorted(128 * n for n in numbers)
    best = sizes[leader % len(sizes)]
    points = family({size: 0.0 if size == best else cost for size, cost in zip(sizes, costs, strict=False)})
    found = new_chunks(evidence(dict(zip(sizes, levels, strict=False))), best, points, 16)
    assert len(found) == len(set(found))
    for size in found:
        assert sizes[0] < size < sizes[-1]
        assert size not in sizes
        assert size % 16 == 0


@given(st.integers(2, 60), st.integers(2, 60))
def test_halving_ends(low: int, high: int) -> None:
    """The best in the middle of ever closer neighbours: after a few steps nothing is left to measure."""
    costs = {128 * min(low, high): 0.1, 128 * (max(low, high) + 1): 0.0}
    best = max(costs)
    for _ in range(12):
        found = new_chunks(FREE, best, family(costs), 16)
        costs |= dict.fromkeys(found, 0.05)
        if not found:
            break
    assert not found
    below = [size for size in costs if size < best]
    assert best / max(below) <= NEAR or best - max(below) < 2 * grid_step(max(below), 16)
