"""A run of `regress` on fake engines: stages, stock beside it, limits, suspects, and a rebase."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen import frozen_of, round_of
from tests.fakes.heard import Heard
from tests.fakes.scripted_starts import carry_out, scripted
from tests.fakes.sessions import Fault
from tuner.domain.experiment import Fingerprint
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Measurement
from tuner.domain.profile import Constraint
from tuner.errors import EngineError, LoadError
from tuner.experiment.events import Events
from tuner.freeze import load_frozen, save_frozen
from tuner.regress.limits import judge_limits
from tuner.regress.measure import notes_of, profile_of
from tuner.regress.plan import default_starts, few_starts_advice
from tuner.regress.rebase import rebased
from tuner.regress.run import RunPlan, RunResult, rounds_at_freeze
from tuner.regress.verdict import Rules

AT_FREEZE = [[ms * w for w in (0.996, 1.0, 1.004)] for ms in (99.0, 100.0, 101.5, 100.5, 99.5, 98.5)]
STOCK_AT_FREEZE = [[1.2 * ms for ms in start] for start in AT_FREEZE]
GATE = "ttft_ms.p90"
FIRST = "3 starts in all, 3 rounds on each"


def frozen(**changes: Any) -> Frozen:
    return frozen_of(AT_FREEZE, stock=STOCK_AT_FREEZE).model_copy(update={"constraints": [], **changes})


def plan_of(document: Frozen | None = None, now: Fingerprint | None = None, **fields: Any) -> RunPlan:
    document = document or frozen()
    defaults: dict[str, Any] = {"planned": 3, "rounds": 3, "stock_mode": "never"}
    return RunPlan(document, now or document.fingerprint, **(defaults | fields))


class Played:
    """A run with its result and what led to it."""

    def __init__(self, plan: RunPlan, p90s: Mapping[str, Sequence[float]], **more: Any) -> None:
        self.plan = plan
        self.engines = scripted(p90s, **more)

    async def result(self, events: Events | None = None) -> RunResult:
        self.results = await carry_out(self.plan.design(), self.engines, events)
        return self.plan.result(self.results)


async def played(p90s: Sequence[float], stock: Sequence[float] = (), **plan: Any) -> RunResult:
    return await Played(plan_of(**plan), {"frozen": p90s, "stock": stock}).result()


async def test_a_run_without_a_suspicion_takes_the_planned_starts() -> None:
    run, heard = Played(plan_of(), {"frozen": [100.0, 99.0, 101.0]}), Heard()
    result = await run.result(heard)
    assert result.verdict == "ok"
    assert run.engines.order == ["frozen"] * 3
    assert result.suspects == []
    assert heard.told == [FIRST]
    assert [len(start) for start in result.rounds] == [3, 3, 3]
    assert {s.purpose for s in run.results.starts} == {"regress"}
    assert [s.engine_args for s in run.results.starts] == [run.plan.frozen.engine_args] * 3


async def test_a_suspicion_is_answered_with_fresh_starts_before_the_alarm() -> None:
    result = await played([120.0, 121.0, 119.0])
    assert result.verdict == "regressed"
    assert result.starts == 6
    assert result.metrics[GATE].change == pytest.approx(0.2, abs=0.02)


async def test_fresh_starts_can_clear_a_suspicion() -> None:
    result = await played([106.0, 105.0, 104.0, 100.0, 99.0, 100.0])
    assert result.verdict == "ok"
    assert result.starts > 3


async def test_a_run_is_bounded() -> None:
    assert (await played([104.6, 104.4], rules=Rules(tolerance=0.2))).starts <= 9


async def test_stock_is_measured_turn_about_and_only_beside_the_further_starts() -> None:
    run = Played(plan_of(stock_mode="auto"), {"frozen": [120.0], "stock": [144.0]})
    result = await run.result()
    assert run.engines.order[:3] == ["frozen"] * 3
    assert run.engines.order[3:7] == ["stock", "frozen", "frozen", "stock"]
    assert result.stock[GATE].change == pytest.approx(0.2, abs=0.02)
    contrast = result.metrics[GATE].vs_stock
    assert contrast is not None
    assert contrast.ci95 is not None
    assert contrast.change == pytest.approx(120 / 144 - 1, abs=0.01)
    assert contrast.ci95[0] < contrast.change < contrast.ci95[1] < 0


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("never", [FIRST, f"a suspicion ({GATE}): 6 starts in all, 3 rounds on each"]),
        ("auto", [FIRST, f"a suspicion ({GATE}): 9 starts in all, 3 rounds on each"]),
        (
            "always",
            ["6 starts in all, 3 rounds on each", f"a suspicion ({GATE}): 12 starts in all, 3 rounds on each"],
        ),
    ],
)
async def test_the_starts_are_counted_before_they_are_made(mode: str, told: list[str]) -> None:
    run, heard = Played(plan_of(stock_mode=mode), {"frozen": [120.0], "stock": [120.0]}), Heard()
    await run.result(heard)
    assert heard.told == told
    assert heard.expectations[-1] == (len(run.engines.order), None)


@pytest.mark.parametrize("document", [frozen(stock=None), frozen_of(AT_FREEZE, stock=AT_FREEZE, verdict="stock")])
async def test_stock_is_not_started_where_there_is_none_or_it_is_what_was_frozen(document: Frozen) -> None:
    if document.stock is not None:
        document = document.model_copy(
            update={"stock": document.stock.model_copy(update={"engine_args": document.engine_args})}
        )
    run = Played(plan_of(document, stock_mode="always"), {"frozen": [120.0]})
    await run.result()
    assert run.engines.order == ["frozen"] * 6


async def test_a_change_that_stock_shows_too_is_the_machine_s() -> None:
    result = await played([108.0], [129.6], stock_mode="always")
    assert result.verdict == "ok"
    assert any("so the machine changed, not the configuration" in note for note in result.notes)


async def test_a_machine_that_is_far_slower_is_a_regression_with_the_machine_for_a_suspect() -> None:
    result = await played([150.0], [180.0], stock_mode="always")
    assert result.verdict == "regressed"
    assert any("the stock setting changed too" in s for s in result.suspects)


async def test_an_unchanged_stock_leaves_the_regression() -> None:
    assert (await played([120.0], [120.0], stock_mode="always")).verdict == "regressed"


async def test_a_new_vllm_slows_stock_as_well_and_stays_a_regression() -> None:
    now = frozen().fingerprint.model_copy(update={"vllm_version": "0.33.0"})
    result = await played([120.0], [144.0], now=now, stock_mode="always")
    assert result.verdict == "regressed"
    assert any("0.33.0" in s for s in result.suspects)
    assert any("stock" in s for s in result.suspects)


async def test_a_model_revision_that_only_the_engine_knows_is_a_suspect() -> None:
    asked = frozen().fingerprint
    document = frozen(fingerprint=asked.model_copy(update={"model_revision": "aaa"}))
    run = Played(plan_of(document, asked), {"frozen": [120.0]}, model_revision="bbb")
    assert any("model revision" in s and "bbb" in s for s in (await run.result()).suspects)


async def test_without_a_recorded_change_the_suspect_is_the_machine() -> None:
    assert "machine" in (await played([120.0])).suspects[0]


async def test_a_failure_of_the_surroundings_is_repeated_once() -> None:
    fault = Fault("boot", "no_free_memory", start=2, message="no free memory")
    run = Played(plan_of(), {"frozen": [100.0]}, faults=[fault])
    assert (await run.result()).verdict == "ok"
    assert [s.state for s in run.results.starts] == ["completed", "engine_failed", "completed", "completed"]
    assert notes_of(run.results) == ["start 2 (frozen) failed and was repeated: no free memory"]


@pytest.mark.parametrize(
    ("fault", "starts"),
    [
        (Fault("boot", "no_free_memory"), 2),
        (Fault("boot", "cuda_oom"), 1),
        (Fault("boot", "unknown_option"), 1),
        (Fault("round", "engine_died", times=2), 2),
    ],
)
async def test_what_a_repeat_cannot_mend_ends_the_run_without_a_verdict(fault: Fault, starts: int) -> None:
    run = Played(plan_of(), {"frozen": [100.0]}, faults=[fault])
    with pytest.raises(EngineError, match=f"start {starts}, frozen: a fault on demand") as error:
        await run.result()
    assert error.value.diagnosis.code == fault.code
    assert len(run.engines.order) == starts


async def test_no_more_than_three_starts_are_repeated() -> None:
    faults = [Fault("boot", "port_in_use", start=n) for n in (1, 3, 5, 7)]
    run = Played(plan_of(planned=9), {"frozen": [100.0]}, faults=faults)
    with pytest.raises(EngineError, match="start 7"):
        await run.result()


async def test_rounds_that_do_not_count_are_a_load_error() -> None:
    fault = Fault("discard", "http_error", message="20 of 20 requests failed: HTTP 500")
    with pytest.raises(LoadError, match="start 1, frozen: 20 of 20 requests failed"):
        await Played(plan_of(), {"frozen": [100.0]}, faults=[fault]).result()


async def test_a_discarded_round_is_made_again_and_noted() -> None:
    fault = Fault("discard", "warm_cache", times=1, message="the prefix was cached")
    run = Played(plan_of(), {"frozen": [100.0]}, faults=[fault])
    assert [len(start) for start in (await run.result()).rounds] == [3, 3, 3]
    assert notes_of(run.results) == ["start 1: a round of frozen was discarded: the prefix was cached"]


async def test_a_gain_with_more_failed_requests_is_none() -> None:
    run = Played(plan_of(), {"frozen": [60.0]})
    assert (await run.result()).verdict == "improved"
    run = Played(plan_of(), {"frozen": [60.0]}, failed={"frozen": 1})
    result = await run.result()
    assert result.verdict == "ok"
    assert "at the freeze 0 of 288 requests, now 9 of 144" in result.metrics[GATE].reason
    assert result.metrics["failed_requests"].now == 1


async def test_a_broken_limit_makes_the_run_regressed() -> None:
    document = frozen(constraints=[Constraint.parse("failed_requests == 0")])
    run = Played(plan_of(document), {"frozen": [100.0]}, failed={"frozen": 1})
    assert (await run.result()).verdict == "regressed"


async def test_a_rebase_keeps_the_old_numbers_and_can_be_read_again(tmp_path: Path) -> None:
    document = frozen()
    plan = plan_of(document, rules=Rules(stages=1), stock_mode="auto", rebase=True)
    run, heard = Played(plan, {"frozen": [110.0], "stock": [130.0]}), Heard()
    result = await run.result(heard)
    assert heard.expectations == [(6, None)]
    fresh = rebased(result, "2026-11-02T00:00:00+00:00")
    assert fresh.measured.starts == result.starts == 3
    assert fresh.measured.median.ttft_ms is not None
    assert fresh.measured.median.ttft_ms.p90 == pytest.approx(110.0, rel=0.01)
    assert fresh.stock is not None
    assert document.stock is not None
    assert fresh.stock.starts == 3
    assert fresh.stock.engine_args == document.stock.engine_args
    assert fresh.previous[0]["measured"] == document.measured.to_json()
    assert fresh.previous[0]["stock"] == document.stock.to_json()
    save_frozen(tmp_path / "f.json", fresh)
    assert load_frozen(tmp_path / "f.json") == fresh


async def test_a_rebase_without_stock_keeps_no_stock_of_another_day() -> None:
    fresh = rebased(await played([110.0], rules=Rules(stages=1), rebase=True), "2026-11-02")
    assert fresh.stock is None
    assert fresh.previous[0]["stock"] is not None


async def test_a_rebase_of_stock_itself_is_both() -> None:
    document = frozen()
    assert document.stock is not None
    same = document.stock.model_copy(update={"engine_args": document.engine_args})
    fresh = rebased(await played([110.0], document=frozen(stock=same), rebase=True), "2026-11-02")
    assert fresh.stock is not None
    assert fresh.stock.rounds == fresh.measured.rounds


async def test_the_advice_to_rebase_is_given_in_any_run_but_a_rebase() -> None:
    document = frozen()
    document = document.model_copy(update={"measured": document.measured.model_copy(update={"starts": 1})})
    plain = await played([100.0], [120.0], document=document)
    assert any("--rebase" in note and "it takes 24 starts" in note for note in plain.notes)
    rebase = await played([100.0], [120.0], document=document, rebase=True)
    assert not any("--rebase" in note for note in rebase.notes)


def limit(text: str, then: list[list[Measurement]], now: list[list[Measurement]]) -> tuple[str, bool]:
    judged = judge_limits([Constraint.parse(text)], then, now, Rules())[0]
    return judged.verdict, judged.broken


def starts_at(*p90s: float) -> list[list[Measurement]]:
    return [[round_of(p)] * 2 for p in p90s]


def test_a_limit_that_holds_is_ok() -> None:
    assert limit("ttft_ms.p90 <= 120", starts_at(100, 101, 99), starts_at(110, 111)) == ("ok", False)


def test_a_limit_just_crossed_within_the_spread_is_shown_and_no_regression() -> None:
    assert limit("ttft_ms.p90 <= 100.5", starts_at(100, 101, 99), starts_at(101, 101, 102)) == ("ok", True)


def test_a_limit_crossed_significantly_is_a_regression() -> None:
    assert limit("ttft_ms.p90 <= 105", starts_at(100, 101, 99), starts_at(130, 131, 129)) == ("regressed", True)


def failing(*counts: int) -> list[list[Measurement]]:
    return [[round_of(100.0).model_copy(update={"failed_requests": c})] for c in counts]


def test_failed_requests_in_most_starts_are_a_regression_and_in_one_are_not() -> None:
    assert limit("failed_requests == 0", failing(0, 0, 0), failing(1, 2, 0)) == ("regressed", True)
    assert limit("failed_requests == 0", failing(0, 0, 0), failing(0, 2, 0)) == ("ok", False)


def test_a_limit_on_what_was_not_measured_is_inconclusive() -> None:
    assert limit("itl_ms.p99 <= 10", starts_at(100), starts_at(100)) == ("inconclusive", False)


async def test_the_json_document_has_what_the_contract_says() -> None:
    result = await played([120.0], [120.0], stock_mode="auto")
    document = json.loads(json.dumps(result.to_json()))
    assert document["verdict"] == "regressed"
    assert set(document) >= {"verdict", "metrics", "change_point", "suspects"}
    row = document["metrics"][GATE]
    assert set(row) >= {"baseline", "now", "change", "ci95", "vs_stock", "verdict"}
    assert set(row["vs_stock"]) == {"change", "ci95"}
    assert document["change_point"] is None
    assert document["starts"] == {"frozen": 6, "now": 6}


def test_the_default_number_of_starts() -> None:
    assert [default_starts(n) for n in (1, 2, 3, 6, 12, 30)] == [3, 3, 3, 3, 1, 1]
    assert "--rebase FILE (it takes 12 starts)" in few_starts_advice(1, stock=False)
    assert few_starts_advice(3, stock=True) == ""


def test_the_frozen_file_as_a_profile_keeps_what_an_engine_needs() -> None:
    document = frozen()
    profile = profile_of(document, 2)
    assert profile.engine.args == document.engine_args
    assert profile.engine.startup_timeout == document.startup_timeout_s
    assert profile.workload == document.workload
    assert rounds_at_freeze(document) == 3
