import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.domain.measurement import Latency, Measurement
from tuner.measure import relative_change
from tuner.measure.bootstrap import RoundValue, redraw, stretch
from tuner.measure.change import change_between
from tuner.measure.percentiles import nearest_rank
from tuner.measure.samples import Sample


def _rounds(*values: float, name: str = "request_throughput") -> list[Measurement]:
    return [Measurement(**{name: v}) for v in values]


def test_the_change_is_between_medians() -> None:
    found = relative_change(_rounds(10, 11, 30), _rounds(22, 20, 5), "request_throughput")
    assert (found.baseline, found.now) == (11, 20)
    assert found.change == pytest.approx(20 / 11 - 1)


@pytest.mark.parametrize(("before", "after", "side"), [([], [1.0], "baseline"), ([1.0], [], "new side")])
def test_a_side_without_the_metric_gives_no_change_but_a_reason(before, after, side: str) -> None:
    found = relative_change(_rounds(*before), _rounds(*after), "request_throughput")
    assert (found.change, found.ci95, found.differs) == (None, None, None)
    assert side in found.reason


@pytest.mark.parametrize(("now", "change"), [(0, 0.0), (3, None)])
def test_a_baseline_of_0_has_no_relative_change(now: int, change: float | None) -> None:
    found = relative_change(
        _rounds(0, 0, name="failed_requests"), _rounds(now, now, name="failed_requests"), "failed_requests"
    )
    assert found.change == change
    assert "0" in found.reason


def test_one_round_a_side_without_requests_has_no_interval() -> None:
    found = relative_change(_rounds(10), _rounds(20), "request_throughput")
    assert found.change == 1.0
    assert found.ci95 is None
    assert "one round" in found.reason


def test_one_round_a_side_with_requests_has_one(make) -> None:
    before, after = make.natural(1), make.natural(2, scale=1.5)
    found = relative_change(
        [make.measure(before)],
        [make.measure(after)],
        "ttft_ms.p50",
        baseline_observations=[before],
        now_observations=[after],
    )
    assert found.ci95 is not None
    assert found.ci95[0] > 0.2
    assert found.ci95[1] < 0.9


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(KeyError):
        relative_change(_rounds(1, 2), _rounds(1, 2), "ttft_ms.p42")


def test_the_same_question_has_the_same_answer(make) -> None:
    observations = [make.natural(i) for i in range(4)]
    rounds = [make.measure(o) for o in observations]

    def ask() -> object:
        return relative_change(
            rounds[:2],
            rounds[2:],
            "ttft_ms.p90",
            baseline_observations=observations[:2],
            now_observations=observations[2:],
        )

    assert ask() == ask()


positive = st.lists(st.floats(1, 1e4), min_size=2, max_size=6)


@given(positive, positive)
@settings(max_examples=60, deadline=None)
def test_the_interval_holds_the_change_and_swapping_the_sides_turns_its_sign(
    one: list[float], other: list[float]
) -> None:
    there = relative_change(_rounds(*one), _rounds(*other), "request_throughput")
    back = relative_change(_rounds(*other), _rounds(*one), "request_throughput")
    assert there.ci95 is not None
    assert there.ci95[0] <= there.change * (1 + 1e-9) + 1e-9
    assert there.ci95[1] >= there.change - abs(there.change) * 1e-9 - 1e-9
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1)


@given(positive, st.floats(0.01, 100))
@settings(max_examples=30, deadline=None)
def test_the_interval_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    shifted = [v * 1.3 for v in values]
    plain = relative_change(_rounds(*values), _rounds(*shifted), "request_throughput")
    scaled = relative_change(
        _rounds(*(v * unit for v in values)), _rounds(*(v * unit for v in shifted)), "request_throughput"
    )
    assert scaled.change == pytest.approx(plain.change)


@pytest.mark.parametrize("seed", range(6))
def test_a_large_slowdown_is_seen_and_none_is_not(make, seed: int) -> None:
    def side(scale: float, first: int):
        observations = [make.natural(seed * 100 + first + i, scale=scale, spread=0.1) for i in range(6)]
        return [make.measure(o) for o in observations], observations

    base, base_seen = side(1.0, 0)
    for scale, differs in ((1.0, False), (1.25, True)):
        now, now_seen = side(scale, 50)
        found = relative_change(base, now, "ttft_ms.p50", baseline_observations=base_seen, now_observations=now_seen)
        assert found.differs is differs


def test_rounds_of_one_start_are_tighter_than_as_many_starts() -> None:
    """Three starts with two rounds each: the starts differ, their rounds hardly."""
    values = [100, 100.5, 110, 110.5, 120, 120.5]
    one = relative_change(_rounds(*values), _rounds(*values), "request_throughput")
    starts = [0, 0, 1, 1, 2, 2]
    three = relative_change(
        _rounds(*values), _rounds(*values), "request_throughput", baseline_starts=starts, now_starts=starts
    )
    assert three.ci95[1] - three.ci95[0] > one.ci95[1] - one.ci95[0]


def test_few_rounds_stretch_the_interval_and_many_do_not() -> None:
    assert stretch([3, 3]) == pytest.approx(1.5**0.5 * 2.776 / 1.960, rel=1e-3)
    assert stretch([2]) > stretch([3]) > stretch([10]) > 1
    assert stretch([1000]) == pytest.approx(1, abs=0.01)
    assert stretch([1, 1]) == 1.0


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


def test_negative_values_get_a_plain_interval() -> None:
    before = [RoundValue(-1.0), RoundValue(-1.2), RoundValue(-0.9)]
    after = [RoundValue(1.0), RoundValue(1.1), RoundValue(0.9)]
    found = change_between(before, after, "x")
    assert found.ci95 is not None
    assert found.ci95[0] <= found.change <= found.ci95[1]


def test_a_latency_compares_by_its_statistic() -> None:
    one = Measurement(ttft_ms=Latency(p50=100, p90=200, p99=300, mean=120, n=50))
    two = Measurement(ttft_ms=Latency(p50=110, p90=100, p99=300, mean=120, n=50))
    assert relative_change([one, one], [two, two], "ttft_ms.p50").change == pytest.approx(0.1)
    assert relative_change([one, one], [two, two], "ttft_ms.p90").change == pytest.approx(-0.5)
