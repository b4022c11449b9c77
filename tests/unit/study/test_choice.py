"""Who goes to the finals and who wins."""

import pytest

from tuner.domain.setting import ReuseBudget
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.experiment import State, Trial
from tuner.domain.profile import Objective
from tuner.study.choice import candidate_of, finalists, pareto_front, ranked, winner

P90 = Objective(minimize=["ttft_ms.p90"])


def latency(p90: float) -> Latency:
    return Latency(p50=p90 / 2, p90=p90, p99=p90 * 2, mean=p90, n=200)


def trial(
    number: int,
    p90: float | None,
    *,
    state: State = "completed",
    violations: tuple[str, ...] = (),
    budget: ReuseBudget | None = None,
    chunk: int | None = None,
    rate: float | None = None,
) -> Trial:
    median = Measurement(ttft_ms=None if p90 is None else latency(p90), request_throughput=rate)
    return Trial(
        number=number,
        role="final",
        state=state,
        engine_args={},
        knobs={"max_num_batched_tokens": chunk or number * 128},
        reuse_budget=budget,
        median=median,
        violations=list(violations),
    )


def test_the_lowest_wins_and_failures_never_do() -> None:
    trials = [
        trial(1, 90.0),
        trial(2, 40.0, state="engine_failed"),
        trial(3, 50.0, violations=("ttft_ms.p99 <= 60: 100",)),
        trial(4, None),
        trial(5, 70.0),
    ]
    assert [t.number for t in ranked(trials, P90)] == [5, 1]
    assert [t.number for t in finalists([*trials, trial(6, 60.0)], P90)] == [6, 5]


def test_no_feasible_trial_has_no_winner() -> None:
    assert winner([trial(1, 50.0, state="load_failed")], P90, beats=lambda a, b: True) is None


def test_two_objectives_take_the_front_and_its_knee() -> None:
    objective = Objective(minimize=["ttft_ms.p90"], maximize=["request_throughput"])
    trials = [trial(1, 50.0, rate=10.0), trial(2, 55.0, rate=19.0), trial(3, 90.0, rate=20.0), trial(4, 95.0, rate=9.0)]
    assert {t.number for t in pareto_front(trials, objective)} == {1, 2, 3}
    assert ranked(trials, objective)[0].number == 2


def kept(number: int, p90: float) -> Trial:
    """With the scheduler plug-in."""
    return trial(number, p90, budget=ReuseBudget(max_cached_blocks=64), chunk=512)


@pytest.mark.parametrize(("beyond_noise", "wins"), [(True, 1), (False, 2)])
def test_the_plugin_wins_only_beyond_the_noise(beyond_noise: bool, wins: int) -> None:
    found = winner([kept(1, 50.0), trial(2, 52.0, chunk=512)], P90, beats=lambda a, b: beyond_noise)
    assert found is not None
    assert found.number == wins


def test_a_budget_that_is_off_is_no_plugin() -> None:
    off = trial(1, 50.0, budget=ReuseBudget(yield_chunk_tokens=64), chunk=512)
    found = winner([off, trial(2, 52.0, chunk=1024)], P90, beats=lambda a, b: False)
    assert found is off


def test_a_second_finalist_with_the_plugin_has_to_beat_the_plain_one_too() -> None:
    finals = [kept(1, 50.0), kept(2, 51.0), trial(3, 52.0, chunk=512), trial(4, 51.5, chunk=1024)]
    asked: list[tuple[int, int]] = []

    def beats(one: Trial, other: Trial) -> bool:
        asked.append((one.number, other.number))
        return False

    found = winner(finals, P90, beats=beats)
    assert found is not None
    assert found.number == 4
    assert asked == [(1, 4), (2, 4)]


@pytest.mark.parametrize(("beyond_noise", "wins"), [(True, 9), (False, 2)])
def test_stock_wins_where_it_is_better_beyond_the_noise(beyond_noise: bool, wins: int) -> None:
    stock = trial(9, 40.0, chunk=2048)
    found = winner([kept(1, 50.0), trial(2, 52.0, chunk=512)], P90, beats=lambda a, b: beyond_noise and a is stock,
                   stock=stock)  # fmt: skip
    assert found is not None
    assert found.number == wins


def test_the_plugin_is_held_against_stock_where_that_is_the_best_plain_one() -> None:
    stock = trial(9, 40.0, chunk=2048)
    finals = [kept(1, 20.0), trial(2, 52.0, chunk=512)]
    found = winner(finals, P90, beats=lambda a, b: (a.number, b.number) == (1, 9), stock=stock)
    assert found is not None
    assert found.number == 1


def test_the_plugin_wins_where_nothing_else_is_feasible() -> None:
    finals = [kept(1, 50.0), trial(2, 40.0, violations=("failed_requests == 0: 3",), chunk=512)]
    found = winner(finals, P90, beats=lambda a, b: False)
    assert found is not None
    assert found.number == 1


def test_a_candidate_is_read_back_from_its_trial() -> None:
    budget = ReuseBudget(max_cached_blocks=64)
    assert candidate_of(trial(1, 1.0, budget=budget)).effective_budget == budget
