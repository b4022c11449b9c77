"""The verdict's two conditions, its stages, and what must not change it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tuner.regress.verdict import (
    Evidence,
    Judgement,
    Rules,
    explained_by_stock,
    judge,
    judge_metric,
    overall,
    starts_by_stage,
)

TTFT, RATE = "ttft_ms.p90", "request_throughput"
STEADY = [[99.0, 100.0, 101.0], [98.0, 100.0, 102.0], [100.0, 100.5, 99.5], [101.0, 99.0, 100.0]]


def scaled(factor: float, starts: list[list[float]] = STEADY) -> list[list[float]]:
    return [[v * factor for v in start] for start in starts]


def run(
    factors: dict[str, float], *, stage: int = 3, rules: Rules | None = None, last_run: float | None = None
) -> Judgement:
    evidence = {
        name: Evidence(STEADY, scaled(factor), scaled(last_run) if last_run else ()) for name, factor in factors.items()
    }
    return judge(evidence, (TTFT, RATE), rules or Rules(), stage=stage)


def test_the_same_again_is_ok() -> None:
    verdict = run({TTFT: 1.0, RATE: 1.0})
    assert verdict.verdict == "ok"
    assert not verdict.more_wanted


@pytest.mark.parametrize(
    ("factors", "word"),
    [
        ({TTFT: 1.5, RATE: 1.0}, "regressed"),
        ({TTFT: 1.0, RATE: 0.7}, "regressed"),
        ({TTFT: 0.6, RATE: 1.0}, "improved"),
        ({TTFT: 1.0, RATE: 1.5}, "improved"),
        ({TTFT: 0.6, RATE: 0.6}, "regressed"),
    ],
)
def test_each_metric_has_its_bad_direction(factors: dict[str, float], word: str) -> None:
    assert run(factors).verdict == word


def test_an_alarm_needs_a_second_stage_of_fresh_starts() -> None:
    first = run({TTFT: 1.5, RATE: 1.0}, stage=1)
    assert first.verdict == "ok"
    assert first.more_wanted
    assert run({TTFT: 1.5, RATE: 1.0}, stage=2).verdict == "regressed"


def test_where_only_one_stage_is_allowed_it_may_alarm() -> None:
    assert run({TTFT: 1.5, RATE: 1.0}, stage=1, rules=Rules(stages=1)).verdict == "regressed"


def test_a_first_stage_without_a_suspicion_ends_the_run() -> None:
    assert not run({TTFT: 1.0, RATE: 1.0}, stage=1).more_wanted


def test_stages_are_bounded() -> None:
    assert not run({TTFT: 1.035, RATE: 1.0}, stage=3).more_wanted


def test_starts_of_a_stage() -> None:
    assert [starts_by_stage(3, n) for n in (0, 1, 2, 3)] == [0, 3, 6, 9]
    assert [starts_by_stage(1, n) for n in (1, 2, 3)] == [1, 3, 5]


def test_significant_but_within_the_tolerance_is_ok() -> None:
    then = [[100.0 + i % 3 * 0.01] * 3 for i in range(200)]
    evidence = Evidence(then, scaled(1.005, then))
    assert judge_metric(TTFT, evidence, Rules(tolerance=0.02)).verdict == "ok"
    assert judge_metric(TTFT, evidence, Rules(tolerance=0.001)).verdict == "regressed"


def test_beyond_the_tolerance_but_not_significant_is_no_regression() -> None:
    wild = [[70.0], [140.0], [95.0], [110.0]]
    judged = judge_metric(TTFT, Evidence(wild, scaled(1.2, wild)), Rules(tolerance=0.05))
    assert judged.change == pytest.approx(0.2)
    assert judged.verdict == "ok"


def test_a_given_tolerance_takes_the_place_of_the_measured_one() -> None:
    assert run({TTFT: 1.2, RATE: 1.0}, rules=Rules(tolerance=0.3)).verdict == "ok"
    assert run({TTFT: 1.2, RATE: 1.0}, rules=Rules(tolerance=0.05)).verdict == "regressed"


def test_starts_that_differ_by_themselves_do_not_alarm() -> None:
    """Speed chosen per process, 0.9 or 1.15: the change of a single run is within that."""
    then = [[90.0, 91.0], [115.0, 114.0], [90.0, 89.0]]
    now = [[115.0, 116.0], [115.0, 114.0], [90.0, 91.0]]
    assert judge_metric(TTFT, Evidence(then, now), Rules()).verdict == "ok"


def test_doubt_at_the_end_is_inconclusive_and_says_so() -> None:
    three = STEADY[:3]
    judged = judge_metric(TTFT, Evidence(three, scaled(1.065, three)), Rules(), share=2)
    assert judged.verdict == "inconclusive"
    assert judged.reason


def test_two_doubtful_runs_make_an_alarm() -> None:
    three = STEADY[:3]
    alone = Evidence(three, scaled(1.06, three))
    both = Evidence(three, scaled(1.06, three), scaled(1.08, three))
    assert judge_metric(TTFT, alone, Rules(), share=2).verdict == "inconclusive"
    judged = judge_metric(TTFT, both, Rules(), share=2)
    assert judged.verdict == "regressed"
    assert judged.with_last_run


def test_a_bad_last_run_does_not_condemn_a_good_one() -> None:
    three = STEADY[:3]
    assert judge_metric(TTFT, Evidence(three, three, scaled(1.3, three)), Rules()).verdict == "ok"


def test_earlier_runs_tell_the_spread_and_never_the_level() -> None:
    slow_runs = [scaled(1.5) for _ in range(10)]
    judged = judge_metric(TTFT, Evidence(STEADY, scaled(1.5), earlier=slow_runs), Rules())
    assert judged.verdict == "regressed"
    assert judged.change == pytest.approx(0.5)


@pytest.mark.parametrize(
    "evidence",
    [Evidence([], STEADY), Evidence(STEADY, []), Evidence(STEADY, [[]]), Evidence(STEADY, [[0.0, 1.0]])],
)
def test_a_gate_metric_without_values_is_inconclusive_with_the_reason(evidence: Evidence) -> None:
    judged = judge_metric(TTFT, evidence, Rules())
    assert judged.verdict == "inconclusive"
    assert judged.reason


def test_other_metrics_are_shown_and_decide_nothing() -> None:
    evidence = {
        TTFT: Evidence(STEADY, STEADY),
        RATE: Evidence(STEADY, STEADY),
        "itl_ms.p99": Evidence(STEADY, scaled(2.0)),
    }
    verdict = judge(evidence, (TTFT, RATE), Rules(), stage=3)
    assert verdict.metrics["itl_ms.p99"].verdict == "regressed"
    assert verdict.verdict == "ok"
    assert not verdict.more_wanted


def test_the_gravest_word_wins() -> None:
    assert overall(["ok", "improved", "inconclusive"]) == "inconclusive"
    assert overall(["improved", "regressed"]) == "regressed"
    assert overall(["regressed", "not comparable"]) == "not comparable"
    assert overall([]) == "ok"


def test_a_machine_that_slowed_everything_a_little_explains_the_change() -> None:
    frozen = Evidence(STEADY, scaled(1.08))
    assert explained_by_stock(frozen, Evidence(STEADY, scaled(1.08)), TTFT, Rules())
    assert not explained_by_stock(frozen, Evidence(STEADY, STEADY), TTFT, Rules())
    assert not explained_by_stock(Evidence(STEADY, scaled(1.6)), Evidence(STEADY, scaled(1.08)), TTFT, Rules())


def test_a_machine_that_is_far_slower_is_no_excuse() -> None:
    both = Evidence(STEADY, scaled(1.5))
    assert not explained_by_stock(both, both, TTFT, Rules())


def test_stock_of_which_a_value_is_zero_explains_nothing() -> None:
    assert not explained_by_stock(Evidence(STEADY, scaled(1.08)), Evidence(STEADY, [[0.0]]), TTFT, Rules())


WILD = [[60.0, 100.0, 150.0], [110.0, 70.0, 130.0], [90.0, 160.0, 75.0]]


def test_pairs_see_a_difference_that_starts_and_cycles_would_hide() -> None:
    paired = judge_metric(TTFT, Evidence(WILD, scaled(1.1, WILD), paired=True), Rules())
    apart = judge_metric(TTFT, Evidence(WILD, scaled(1.1, WILD)), Rules())
    assert (paired.verdict, apart.verdict) == ("regressed", "ok")
    assert paired.change == pytest.approx(0.1)
    assert paired.ci95 is not None
    assert paired.ci95[0] > 0.05
    assert judge_metric(RATE, Evidence(WILD, scaled(1.1, WILD), paired=True), Rules()).verdict == "improved"


def test_pairs_of_one_start_are_independent_pieces_where_there_are_no_others() -> None:
    then, now = [WILD[0] * 3], [[1.06 * v for v in WILD[0] * 3]]
    one_start = judge_metric(TTFT, Evidence(then, now, paired=True), Rules(pair_start_sd=0.0))
    a_start = judge_metric(TTFT, Evidence(then, now, paired=True), Rules())
    assert one_start.ci95 is not None
    assert a_start.ci95 is not None
    assert one_start.ci95[0] > a_start.ci95[0]
    assert judge_metric(TTFT, Evidence([[1.0]], [[1.5]], paired=True), Rules(pair_start_sd=0.0)).change is not None


VALUES = st.lists(st.lists(st.floats(min_value=20, max_value=200), min_size=1, max_size=3), min_size=2, max_size=5)


@given(VALUES, VALUES, st.sampled_from([TTFT, RATE]))
def test_swapping_the_sides_flips_the_verdict(a: list[list[float]], b: list[list[float]], metric: str) -> None:
    flipped = {"ok": "ok", "regressed": "improved", "improved": "regressed", "inconclusive": "inconclusive"}
    there = judge_metric(metric, Evidence(a, b), Rules())
    back = judge_metric(metric, Evidence(b, a), Rules())
    assume("inconclusive" not in (there.verdict, back.verdict))
    assert back.verdict == flipped[there.verdict]
    assert there.change is not None
    assert back.change is not None
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1)


@given(VALUES, VALUES, st.floats(min_value=0.1, max_value=10))
def test_the_unit_does_not_matter(a: list[list[float]], b: list[list[float]], factor: float) -> None:
    plain = judge_metric(TTFT, Evidence(a, b), Rules())
    other = judge_metric(TTFT, Evidence(scaled(factor, a), scaled(factor, b)), Rules())
    assert plain.p_worse is not None
    assert other.p_worse == pytest.approx(plain.p_worse, abs=1e-6)


@given(VALUES, st.floats(min_value=1.01, max_value=3))
def test_the_worse_the_less_probable(a: list[list[float]], factor: float) -> None:
    some = judge_metric(TTFT, Evidence(a, scaled(factor, a)), Rules())
    more = judge_metric(TTFT, Evidence(a, scaled(factor * 1.2, a)), Rules())
    assert some.p_worse is not None
    assert more.p_worse is not None
    assert more.p_worse < some.p_worse
