"""Ask and tell: no repeats, no value for failures, nothing left running."""

import optuna
import pytest
from optuna.trial import TrialState

from tests.fakes.profiles import SMALL
from tuner.domain.setting import Setting
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.experiment import State, Trial
from tuner.domain.profile import Profile
from tuner.profile import parse_profile
from tuner.space.search_space import search_space
from tuner.study.search import Search, open_study, settle_leftovers

BASE = SMALL + "constraints: [ttft_ms.p99 <= 100]\n"


def made(*overrides: str, seen: list[Setting] | None = None) -> tuple[Search, optuna.Study, Profile]:
    profile = parse_profile(BASE, overrides=list(overrides))
    study = open_study(optuna.storages.InMemoryStorage(), "s", profile, seed=1)
    return Search(study, search_space(profile), profile, seen or []), study, profile


def outcome(candidate: Setting, p90: float = 10.0, state: State = "completed", number: int = 1) -> Trial:
    latency = Latency(p50=p90, p90=p90, p99=p90 * 2, mean=p90, n=9)
    median = Measurement(ttft_ms=latency) if state == "completed" else None
    return Trial(number=number, role="candidate", state=state, engine_args={}, knobs=candidate.knobs, median=median)


def run_all(search: Search, state: State = "completed") -> list[Setting]:
    found = []
    while (suggestion := search.next()) is not None:
        found.append(suggestion.candidate)
        search.tell(suggestion, outcome(suggestion.candidate, state=state))
        assert len(found) <= 200
    return found


def test_a_small_space_is_enumerated_once() -> None:
    search, study, _ = made()
    assert {c.knobs["max_num_batched_tokens"] for c in run_all(search)} == {128, 256, 512}
    assert search.sampler == "grid"
    assert len(study.get_trials(states=(TrialState.COMPLETE,))) == 3


def test_what_was_seen_does_not_come_again() -> None:
    search, _, _ = made(seen=[Setting(knobs={"max_num_batched_tokens": 256})])
    assert {c.knobs["max_num_batched_tokens"] for c in run_all(search)} == {128, 512}


def test_equal_candidates_of_a_budget_that_is_off_come_once() -> None:
    search, _, _ = made("space.reuse_budget={max_hold_ms: [100, 200]}")
    assert len(run_all(search)) == 3


def test_a_large_space_is_sampled_without_repeats() -> None:
    search, _, _ = made("space.max_num_batched_tokens={low: 16, high: 8192, step: 16}", "budget.trials=30")
    found = run_all(search)
    assert len(found) == 30
    assert len({c.model_dump_json() for c in found}) == 30


def test_a_space_just_above_the_budget_still_gives_that_many() -> None:
    search, _, _ = made("budget.trials=2")
    assert len(run_all(search)) == 2


@pytest.mark.parametrize("state", ["engine_failed", "load_failed", "infeasible"])
def test_a_failure_never_has_a_value(state: State) -> None:
    search, study, _ = made()
    run_all(search, state)
    assert all(t.values is None for t in study.trials)
    with pytest.raises(ValueError, match="No trials are completed"):
        _ = study.best_trial


def test_violated_constraints_reach_the_sampler() -> None:
    search, study, _ = made()
    suggestion = search.next()
    assert suggestion is not None
    search.tell(suggestion, outcome(suggestion.candidate, p90=80.0))  # P99 is 160
    assert study.trials[0].constraints == {"ttft_ms.p99 <= 100": pytest.approx(0.6)}
    with pytest.raises(ValueError, match="feasible"):
        _ = study.best_trial


def test_a_candidate_comes_again_after_a_failure_of_the_environment() -> None:
    search, study, _ = made()
    first = search.next()
    assert first is not None
    search.tell(first, outcome(first.candidate, state="engine_failed"))
    again = search.again(first)
    assert again.candidate == first.candidate
    search.tell(again, outcome(again.candidate))
    assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]


def test_leftovers_of_a_kill_are_settled() -> None:
    search, study, profile = made()
    measured, lost = search.next(), search.next()
    assert measured is not None
    assert lost is not None
    measured.trial.set_user_attr("trial", 7)
    lost.trial.set_user_attr("trial", 8)
    assert settle_leftovers(study, [outcome(measured.candidate, number=7)], profile) == 2
    assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.FAIL]
