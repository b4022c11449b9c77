"""What is frozen and what the sentence says: better, stock, none; limits with a probability; the literal start."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.engines_in_memory import Engines, Levels, Numbers, chunk, problem
from tuner.domain.experiment import STOCK_ID, Results
from tuner.domain.profile import Objective
from tuner.domain.setting import ReuseBudget
from tuner.study.design import SweepDesign
from tuner.study.estimate import setting_lines
from tuner.study.finals import completed_finals
from tuner.study.problem import Problem
from tuner.study.verdict import SURE, Decision, decide

A, B = chunk(512), chunk(1024)


def study(asked: Problem, engines: Engines) -> tuple[Decision, Results, Numbers]:
    numbers = Numbers()
    results = engines.run(SweepDesign(asked, numbers))
    return decide(asked, results, numbers), results, numbers


def levels(**by_label: Levels) -> dict[object, Levels]:
    return {512: by_label["a"], 1024: by_label["b"], None: by_label["stock"]}


def on(found: dict[object, Levels], **more: object) -> Engines:
    return Engines(lambda s: found[s.chunk], **more)  # type: ignore[arg-type]


def test_a_clear_gain_is_frozen_and_the_sentence_has_its_figures() -> None:
    decision, results, numbers = study(problem(A, B), on(levels(a=Levels(80), b=Levels(95), stock=Levels(100))))
    assert (decision.verdict, decision.winner, decision.setting) == ("better", numbers.id_of(A), A)
    assert decision.leader == decision.winner
    assert decision.contrast is not None
    assert decision.contrast.change == pytest.approx(-0.2, abs=0.04)
    assert decision.bound is not None
    assert decision.bound > 0
    assert decision.sentence.startswith("Setting 0 (chunk 512) changes ttft_ms.p90 by -")
    line = next(x for x in setting_lines(problem(A, B), results, finals(results)) if x.id == decision.winner)
    assert line.vs_stock["ttft_ms.p90"] == decision.contrast


def finals(results: Results) -> list[int]:
    return [s.number for s in completed_finals(results)]


@pytest.mark.parametrize("seed", range(6))
def test_a_difference_within_the_noise_leaves_stock(seed: int) -> None:
    asked = problem(A, B, seed=seed)
    engines = on(levels(a=Levels(100), b=Levels(100), stock=Levels(100)), seed=seed, round_sd=0.04)
    decision, _, _ = study(asked, engines)
    assert (decision.verdict, decision.winner) == ("stock", STOCK_ID)
    assert "not significantly different from stock" in decision.sentence
    assert decision.contrast is None


def test_a_stock_that_breaks_a_limit_gives_way_to_the_best_that_keeps_it() -> None:
    asked = problem(A, B, limits=("itl_ms.p99 <= 100",))
    found = levels(a=Levels(130, itl=40), b=Levels(110, itl=60), stock=Levels(100, itl=200))
    decision, _, numbers = study(asked, on(found))
    assert (decision.verdict, decision.winner) == ("better", numbers.id_of(B))
    assert decision.sentence.startswith("Stock breaks itl_ms.p99 <= 100 (about ")
    assert "% higher than stock's (95 % interval +" in decision.sentence
    assert decision.p_feasible is not None
    assert decision.p_feasible >= SURE


def test_a_better_setting_that_may_break_a_limit_is_not_frozen() -> None:
    asked = problem(A, limits=("itl_ms.p99 <= 100",))
    decision, _, _ = study(asked, on(levels(a=Levels(60, itl=102), b=Levels(1), stock=Levels(100, itl=50))))
    assert decision.verdict == "stock"
    assert "meets itl_ms.p99 <= 100 (about" in decision.sentence or "no other setting" in decision.sentence


def test_nothing_that_keeps_the_limits_is_no_verdict() -> None:
    asked = problem(A, B, limits=("itl_ms.p99 <= 10",))
    decision, results, _ = study(asked, on(levels(a=Levels(60), b=Levels(70), stock=Levels(100))))
    assert (decision.verdict, decision.winner, decision.setting) == ("none", None, None)
    assert not any(s.purpose == "literal" for s in results.starts)


def test_failed_requests_break_their_limit_by_one() -> None:
    asked = problem(A, B, limits=("failed_requests == 0",))
    found = levels(a=Levels(60, failed=1), b=Levels(80), stock=Levels(100))
    decision, _, numbers = study(asked, on(found))
    assert decision.winner == numbers.id_of(B)


def test_more_failed_requests_than_stock_are_not_frozen() -> None:
    decision, _, _ = study(problem(A), on(levels(a=Levels(60, failed=2), b=Levels(1), stock=Levels(100, failed=1))))
    assert decision.verdict == "stock"
    assert "more of its requests failed" in decision.sentence


def test_a_setting_that_answers_less_than_stock_is_not_frozen() -> None:
    a, b, stock = Levels(60, answered=0.5), Levels(90, answered=1.0), Levels(100, answered=1.0)
    decision, _, _ = study(problem(A), on(levels(a=a, b=b, stock=stock)))
    assert decision.verdict == "stock"
    assert "it answered 50 % of what was asked, less than stock" in decision.sentence


def test_a_setting_that_answers_less_does_not_win_where_stock_breaks_a_limit() -> None:
    asked = problem(A, limits=("itl_ms.p99 <= 50",))
    a, stock = Levels(60, answered=0.5), Levels(100, itl=90, answered=1.0)
    assert study(asked, on(levels(a=a, b=stock, stock=stock)))[0].verdict == "none"


def test_a_limit_on_a_metric_that_was_not_measured_does_not_hold() -> None:
    asked = problem(A, limits=("prefix_hit_rate >= 0.5",))
    decision, results, _ = study(asked, on(levels(a=Levels(60), b=Levels(1), stock=Levels(100))))
    assert decision.verdict == "none"
    line = setting_lines(asked, results)[0]
    assert line.p_feasible == 0.0


def test_an_objective_that_was_not_measured_crowns_nothing() -> None:
    asked = dataclasses.replace(problem(A, B), objective=Objective(minimize=["goodput"]))
    decision, results, _ = study(asked, on(levels(a=Levels(60), b=Levels(70), stock=Levels(100))))
    assert decision.verdict == "none"
    assert decision.sentence == "goodput, which the profile optimizes, was not measured."
    assert [s.purpose for s in results.starts] == ["search"]


def test_a_metric_of_zero_is_compared_by_differences() -> None:
    asked = problem(A, limits=("failed_requests <= 3",))
    _, results, _ = study(asked, on(levels(a=Levels(60, failed=2), b=Levels(1), stock=Levels(100, failed=0))))
    lines = {line.id: line for line in setting_lines(asked, results)}
    assert lines[0].p_feasible == 1.0
    assert "failed_requests" not in lines[0].vs_stock


def test_a_limit_on_memory_is_decided_by_a_start_of_its_own() -> None:
    asked = problem(A, limits=("memory.peak_fraction <= 0.9",))
    engines = Engines(lambda s: Levels(60 if s.chunk else 100, peak_fraction=0.95 if s.chunk else 0.88))
    decision, results, _ = study(asked, engines)
    literal = [s.settings for s in results.starts if s.purpose == "literal"]
    assert literal == [[0], [STOCK_ID]]
    assert (decision.verdict, decision.winner) == ("stock", STOCK_ID)


def test_a_plugin_that_brings_nothing_is_not_frozen() -> None:
    with_budget = A.model_copy(update={"reuse_budget": ReuseBudget(max_cached_blocks=64)})
    asked = problem(A, with_budget)
    engines = Engines(lambda s: Levels((80 if s.chunk else 100) - (s.reuse_budget is not None) * 0.2))
    decision, results, _ = study(asked, engines)
    assert decision.setting == A
    assert all(len(s.settings) == 3 for s in results.starts if s.purpose == "final")


def test_a_plugin_that_brings_much_is_frozen() -> None:
    with_budget = A.model_copy(update={"reuse_budget": ReuseBudget(max_cached_blocks=64)})
    engines = Engines(lambda s: Levels((80 if s.chunk else 100) - (s.reuse_budget is not None) * 20))
    decision, results, _ = study(problem(A, with_budget), engines)
    assert decision.setting == with_budget
    assert all(p.live_budget for p in engines.plans if p.live)
    assert engines.plans[-1].reuse_budget == with_budget.reuse_budget
    assert results.starts[-1].purpose == "literal"


def test_two_objectives_are_ranked_by_the_distance_to_the_best_of_both() -> None:
    objective = Objective(minimize=["ttft_ms.p90"], maximize=["request_throughput"])
    asked = dataclasses.replace(problem(A, B), objective=objective)
    decision, _, numbers = study(asked, on(levels(a=Levels(80), b=Levels(95), stock=Levels(100))))
    assert decision.winner == numbers.id_of(A)


def test_the_literal_start_agrees_or_the_sentence_says_by_how_much_it_differs() -> None:
    found = levels(a=Levels(80), b=Levels(95), stock=Levels(100))
    agrees, _, _ = study(problem(A, B), on(found))
    assert agrees.literal_agrees is True
    assert "as the finals predict" in agrees.literal
    differs, _, _ = study(problem(A, B), on(found, literal=1.4))
    assert differs.literal_agrees is False
    assert differs.verdict == "better"
    assert "The literal start differs: the start with the frozen command measured ttft_ms.p90 at" in differs.sentence
    assert "above the level of the finals" in differs.sentence


def test_before_a_final_start_is_through_there_is_no_verdict() -> None:
    decision = decide(problem(A), Results(), Numbers())
    assert (decision.verdict, decision.winner) == ("none", None)
    assert "No final start was completed" in decision.sentence


def test_lines_of_the_search_and_of_the_finals() -> None:
    asked = problem(A, B, limits=("itl_ms.p99 <= 100",))
    decision, results, _ = study(asked, on(levels(a=Levels(80), b=Levels(95), stock=Levels(100))))
    everything, last = setting_lines(asked, results), setting_lines(asked, results, finals(results))
    assert {line.id for line in everything} == {0, 1, STOCK_ID}
    winner = next(line for line in last if line.id == decision.winner)
    assert (winner.label, winner.starts, winner.state) == ("chunk 512", 3, "measured")
    assert winner.rounds == sum(r.setting == decision.winner and r.start in finals(results) for r in results.rounds)
    assert winner.median is not None
    assert winner.median.ttft_ms is not None
    low, high = winner.ci95["ttft_ms.p90"]
    assert low <= winner.median.ttft_ms.p90 <= high
    assert winner.p_feasible is not None
    assert winner.p_feasible > 0.99
    stock = next(line for line in last if line.id == STOCK_ID)
    assert stock.vs_stock == {}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    gains=st.tuples(st.floats(0.7, 1.3), st.floats(0.7, 1.3)),
    itl=st.tuples(st.floats(60, 140), st.floats(60, 140), st.floats(60, 140)),
    noise=st.floats(0.0, 0.1),
    failed=st.integers(0, 1),
)
def test_the_verdict_keeps_its_word(
    seed: int, gains: tuple[float, float], itl: tuple[float, float, float], noise: float, failed: int
) -> None:
    """`better` has a bound above zero or a stock that breaks a limit, and always a probability of 0.9."""
    asked = problem(A, B, limits=("itl_ms.p99 <= 100", "failed_requests == 0"), seed=seed)
    found = levels(
        a=Levels(100 * gains[0], itl=itl[0], failed=failed),
        b=Levels(100 * gains[1], itl=itl[1]),
        stock=Levels(100, itl=itl[2]),
    )
    decision, results, _ = study(asked, on(found, seed=seed, round_sd=noise))
    lines = {line.id: line for line in setting_lines(asked, results, finals(results))}
    stock_p = lines[STOCK_ID].p_feasible if STOCK_ID in lines else 0.0
    assert stock_p is not None
    if decision.verdict == "better":
        assert decision.winner is not None
        assert decision.p_feasible is not None
        assert decision.p_feasible >= SURE
        assert lines[decision.winner].p_feasible == decision.p_feasible
        assert stock_p < 0.5 or (decision.bound is not None and decision.bound > 0)
    elif decision.verdict == "stock":
        assert decision.winner == STOCK_ID
        assert stock_p >= 0.5
    else:
        assert decision.winner is None
        assert decision.setting is None
        assert stock_p < 0.5


def test_a_frozen_command_that_does_not_start_is_not_frozen_and_is_tried_once() -> None:
    engines = Engines(
        lambda s: Levels(60 if s.chunk else 100),
        refuses=lambda plan: "kv_cache_too_small" if plan.purpose == "literal" else None,
    )
    decision, results, _ = study(problem(A, B), engines)
    assert [s.purpose for s in results.starts].count("literal") == 1
    assert (decision.verdict, decision.winner) == ("none", None)
    assert decision.sentence == (
        "Nothing can be frozen: the command to be frozen does not start (it says kv_cache_too_small)."
    )


@pytest.mark.parametrize(
    ("a", "words"), [(100, "that is not significantly different from stock."), (130, "that is worse than stock.")]
)
def test_the_sentence_says_whether_the_best_of_the_finals_is_worse(a: float, words: str) -> None:
    decision, _, _ = study(problem(A), Engines(lambda s: Levels(a if s.chunk else 100)))
    assert decision.verdict == "stock"
    assert decision.sentence.endswith(words)
