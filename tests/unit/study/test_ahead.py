"""How many trials a study still makes: as likely at first, exact at the end."""

from __future__ import annotations

import pytest

from tests.fakes import studies
from tests.fakes.profiles import SMALL
from tuner.domain.setting import ReuseBudget
from tuner.domain.experiment import Trial
from tuner.domain.profile import Profile
from tuner.profile import parse_profile
from tuner.study.ahead import trials_ahead
from tuner.study.choice import candidate_of
from tuner.study.finals import plan_finals

STOCK = studies.trial(0, {}, 90.0, role="baseline", label="stock")


def profile(*overrides: str) -> Profile:
    return parse_profile(SMALL, overrides=list(overrides))


def candidate(number: int, chunk: int, *, fits: bool = True, budget: ReuseBudget | None = None) -> Trial:
    found = studies.trial(number, {"max_num_batched_tokens": chunk}, 80.0 + number, budget=budget)
    return found if fits else found.model_copy(update={"violations": ["ttft_ms.p99 <= 1: 160"]})


def through(plan: Profile, measured: list[Trial]) -> list[Trial]:
    """The finals of these trials, in their order."""
    runs = plan_finals(measured[0], [t for t in measured if t.role == "candidate"], plan)
    return [
        studies.trial(50 + n, dict(r.candidate.knobs), 80.0, role="final", final_of=r.of) for n, r in enumerate(runs)
    ]


@pytest.mark.parametrize(
    ("overrides", "candidates", "ahead"),
    [
        ((), 3, 1 + 3 + 2 * 3),
        (("rounds=1",), 3, 1 + 3 + 3),
        (("rounds=2",), 3, 1 + 3 + 2 * 3),
        ((), 1, 1 + 1 + 2 * 2),
        (("rounds=1",), 1, 1 + 1 + 2),
        (("references=[stock, no_chunking]",), 3, 1 + 1 + 3 + 2 * 3),
    ],
)
def test_before_the_first_trial(overrides: tuple[str, ...], candidates: int, ahead: int) -> None:
    assert trials_ahead([], profile(*overrides), candidates) == ahead


@pytest.mark.parametrize("overrides", [(), ("rounds=1",)])
def test_nothing_is_ahead_of_a_finished_study(overrides: tuple[str, ...]) -> None:
    plan = profile(*overrides)
    measured = [STOCK, candidate(1, 128), candidate(2, 256)]
    finals = through(plan, measured)
    assert trials_ahead(measured, plan, 0) == len(finals)
    assert trials_ahead([*measured, finals[0]], plan, 0) == len(finals) - 1
    assert trials_ahead([*measured, *finals], plan, 0) == 0


def test_without_a_feasible_candidate_there_are_no_finals() -> None:
    measured = [STOCK, candidate(1, 128, fits=False)]
    assert trials_ahead(measured, profile(), 1) == 1 + 2 * 2, "the last one may still fit"
    assert trials_ahead([*measured, candidate(2, 256, fits=False)], profile(), 0) == 0


def test_a_baseline_that_cannot_run_has_no_final() -> None:
    stock = studies.failed(0, 8192, "cuda_oom", "out of memory", state="infeasible")
    stock = stock.model_copy(update={"role": "baseline"})
    assert trials_ahead([stock], profile(), 3) == 3 + 2 * 2


def test_the_twin_without_the_plug_in_is_counted() -> None:
    measured = [STOCK, candidate(1, 128, budget=ReuseBudget(max_cached_blocks=64)), candidate(2, 256)]
    assert trials_ahead(measured, profile(), 0) == 2 * 4
    assert candidate_of(measured[1]).effective_budget is not None


def test_what_says_nothing_is_made_again() -> None:
    interrupted = STOCK.model_copy(update={"state": "interrupted"})
    assert trials_ahead([interrupted], profile(), 3) == trials_ahead([], profile(), 3)
