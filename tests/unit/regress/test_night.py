"""A night: looks, the control, the history, limits, suspects, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.frozen_trials import frozen_of, round_of, trial_of
from tests.fakes.heard import Heard
from tests.fakes.scripted_starts import ScriptedStarts
from tuner.domain.setting import ReuseBudget
from tuner.domain.frozen import Frozen
from tuner.domain.measurement import Latency, Measurement
from tuner.domain.experiment import Fingerprint
from tuner.domain.profile import Constraint
from tuner.errors import FileFormatError
from tuner.freeze import load_frozen, save_frozen
from tuner.regress.compare import (
    Comparison,
    compare_configurations,
    configuration_differences,
    evidence,
    same_kind,
    turn,
)
from tuner.regress.history import append_night, baseline_id, evidence_of, read_nights, rolling_view
from tuner.regress.junit import Case, junit_xml, verdict_cases
from tuner.regress.limits import LimitVerdict, judge_limits
from tuner.regress.markdown import night_markdown, sparkline
from tuner.regress.night import NightPlan, NightResult, incomparable, watch
from tuner.regress.plan import default_starts, thin_baseline
from tuner.regress.rebase import rebased
from tuner.regress.starts import Arm, profile_of
from tuner.regress.verdict import MetricVerdict, Rules
from tuner.regress.words import describe, describe_limit
from tuner.trial.progress import Progress, Silent

STOCK: dict[str, Any] = {"engine_args": {"max_num_seqs": 64}, "effective_args": {"max_num_seqs": 64}}
STARTS_MS = [99.0, 100.0, 101.5, 100.5, 99.5, 98.5]


def frozen(**changes: Any) -> Frozen:
    finals = [trial_of(10 + i, [ms * w for w in (0.996, 1.0, 1.004)], role="final") for i, ms in enumerate(STARTS_MS)]
    stock = [
        trial_of(30 + i, [1.2 * ms * w for w in (0.996, 1.0, 1.004)], role="baseline", **STOCK)
        for i, ms in enumerate(STARTS_MS)
    ]
    return frozen_of(finals[0], finals, control=stock).model_copy(update={"constraints": [], **changes})


async def night(
    starts: ScriptedStarts,
    document: Frozen | None = None,
    now: Fingerprint | None = None,
    progress: Progress | None = None,
    **plan: Any,
) -> NightResult:
    document = document or frozen()
    fields: dict[str, Any] = {"planned": 3, "rules": Rules(), "control": "never"}
    the_plan = NightPlan(**(fields | plan))
    return await watch(document, now or document.fingerprint, the_plan, starts, progress or Silent())


async def test_a_calm_night_takes_the_planned_starts() -> None:
    starts = ScriptedStarts({"frozen": [100.0, 99.0, 101.0]})
    result = await night(starts)
    assert result.verdict == "ok"
    assert starts.order == ["frozen"] * 3
    assert result.suspects == []


async def test_a_suspicion_is_answered_with_fresh_starts_before_the_alarm() -> None:
    starts = ScriptedStarts({"frozen": [120.0, 121.0, 119.0]})
    result = await night(starts)
    assert result.verdict == "regressed"
    assert result.starts == 6
    assert result.metrics["ttft_ms.p90"].change == pytest.approx(0.2, abs=0.02)


async def test_fresh_starts_can_clear_a_suspicion() -> None:
    starts = ScriptedStarts({"frozen": [106.0, 105.0, 104.0, 100.0, 99.0, 100.0]})
    result = await night(starts)
    assert result.verdict == "ok"
    assert result.starts > 3


async def test_the_night_is_bounded() -> None:
    starts = ScriptedStarts({"frozen": [104.6, 104.4]})
    await night(starts, rules=Rules(tolerance=0.2))
    assert len(starts.order) <= 9


async def test_the_control_is_interleaved_turn_about_and_only_with_the_extra_starts() -> None:
    starts = ScriptedStarts({"frozen": [120.0], "stock": [144.0]})
    result = await night(starts, control="auto")
    assert starts.order[:3] == ["frozen"] * 3
    assert starts.order[3:7] == ["stock", "frozen", "frozen", "stock"]
    assert result.control["ttft_ms.p90"].change == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("control", "first", "extra"),
    [
        ("never", 3, [(3, "a suspicion (ttft_ms.p90): 3 more starts")]),
        ("auto", 3, [(6, "a suspicion (ttft_ms.p90): 6 more starts, 3 of them of the stock configuration")]),
        ("always", 6, [(6, "a suspicion (ttft_ms.p90): 6 more starts, 3 of them of the stock configuration")]),
    ],
)
async def test_the_starts_are_counted_before_they_are_made(
    control: str, first: int, extra: list[tuple[int, str]]
) -> None:
    starts, heard = ScriptedStarts({"frozen": [120.0], "stock": [120.0]}), Heard()
    await night(starts, progress=heard, control=control)
    assert heard.planned == [(first, "night", "start")]
    assert heard.more == extra
    assert len(starts.order) == heard.total


async def test_a_night_without_a_stock_control_counts_none() -> None:
    starts, heard = ScriptedStarts({"frozen": [120.0]}), Heard()
    await night(starts, frozen(control=None), progress=heard, control="always")
    assert len(starts.order) == heard.total == 6


async def test_what_the_machine_did_to_stock_too_is_not_the_configurations_fault() -> None:
    result = await night(ScriptedStarts({"frozen": [108.0], "stock": [129.6]}), control="always")
    assert result.verdict == "ok"
    assert any("machine" in note for note in result.notes)


async def test_a_machine_that_delivers_far_less_is_a_regression_with_the_machine_for_a_suspect() -> None:
    result = await night(ScriptedStarts({"frozen": [150.0], "stock": [180.0]}), control="always")
    assert result.verdict == "regressed"
    assert any("stock configuration changed too" in s for s in result.suspects)


async def test_a_steady_control_leaves_the_regression_where_it_is() -> None:
    result = await night(ScriptedStarts({"frozen": [120.0], "stock": [120.0]}), control="always")
    assert result.verdict == "regressed"


async def test_a_new_vllm_slows_stock_as_well_and_stays_a_regression() -> None:
    document = frozen()
    now = document.fingerprint.model_copy(update={"vllm_version": "0.33.0"})
    starts = ScriptedStarts({"frozen": [120.0], "stock": [144.0]})
    result = await night(starts, document, now, control="always")
    assert result.verdict == "regressed"
    assert any("0.33.0" in s for s in result.suspects)
    assert any("stock" in s for s in result.suspects)


async def test_a_model_revision_that_only_the_engine_knows_is_a_suspect() -> None:
    document = frozen()
    asked = document.fingerprint
    document = document.model_copy(update={"fingerprint": asked.model_copy(update={"model_revision": "aaa"})})
    starts = ScriptedStarts({"frozen": [120.0]}, model_revision="bbb")
    result = await night(starts, document, asked)
    assert any("model revision" in s and "bbb" in s for s in result.suspects)


async def test_without_a_recorded_change_the_suspect_is_the_machine() -> None:
    result = await night(ScriptedStarts({"frozen": [120.0]}))
    assert "machine" in result.suspects[0]


async def test_a_change_since_the_last_good_night_is_the_first_suspect() -> None:
    document = frozen()
    good = (await night(ScriptedStarts({"frozen": [100.0]}), document)).history_line("2026-11-01")
    now = document.fingerprint.model_copy(update={"vllm_version": "0.33.0"})
    result = await night(ScriptedStarts({"frozen": [120.0]}), document, now, nights=[good])
    assert "2026-11-01" in result.suspects[0]


async def test_two_doubtful_nights_are_judged_together() -> None:
    document = frozen()
    first = await night(ScriptedStarts({"frozen": [103.2]}), document)
    assert first.verdict == "inconclusive"
    second = await night(ScriptedStarts({"frozen": [103.4]}), document, nights=[first.history_line("1")])
    assert second.verdict == "regressed"


async def test_a_last_night_on_other_software_is_not_judged_together() -> None:
    document = frozen()
    line = (await night(ScriptedStarts({"frozen": [103.2]}), document)).history_line("1")
    other = line.model_copy(update={"fingerprint": line.fingerprint.model_copy(update={"driver_version": "1"})})
    now = document.fingerprint.model_copy(update={"driver_version": "2"})
    assert evidence_of("ttft_ms.p90", [[1.0]], [[1.0]], [other], now).last_night == ()
    assert evidence_of("ttft_ms.p90", [[1.0]], [[1.0]], [line], now).last_night != ()


async def test_three_broken_nights_do_not_become_the_new_normal() -> None:
    document = frozen()
    nights = []
    for day in range(3):
        broken = await night(ScriptedStarts({"frozen": [140.0]}), document, nights=nights)
        nights.append(broken.history_line(f"day {day}"))
    assert [n.verdict for n in nights] == ["regressed"] * 3
    again = await night(ScriptedStarts({"frozen": [120.0]}), document, nights=nights)
    assert again.verdict == "regressed"
    calm = await night(ScriptedStarts({"frozen": [100.0]}), document, nights=nights)
    assert calm.verdict == "ok"
    view = next(v for v in calm.rolling if v.metric == "ttft_ms.p90")
    assert view.left_out == 3
    assert view.median == pytest.approx(100.0, rel=0.01)


async def test_the_history_survives_its_file_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    document = frozen()
    line = (await night(ScriptedStarts({"frozen": [100.0]}), document)).history_line("2026-11-01")
    path = tmp_path / "h.jsonl"
    append_night(path, line)
    with path.open("ab") as file:
        file.write(b'{"schema": "chunktune.night/1", "at": "cut')
    append_night(path, line.model_copy(update={"at": "2026-11-02"}))
    before = path.read_bytes()
    nights, damaged = read_nights(path, baseline_id(document))
    assert [n.at for n in nights] == ["2026-11-01", "2026-11-02"]
    assert damaged == 1
    assert nights[0] == line
    append_night(path, line)
    assert path.read_bytes().startswith(before)


async def test_another_baseline_has_another_history(tmp_path: Path) -> None:
    document = frozen()
    result = await night(ScriptedStarts({"frozen": [100.0]}), document)
    append_night(tmp_path / "h.jsonl", result.history_line("1"))
    fresh = rebased(result, "2026-11-02")
    assert read_nights(tmp_path / "h.jsonl", baseline_id(fresh))[0] == []
    assert read_nights(tmp_path / "none.jsonl") == ([], 0)


def test_a_history_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(FileFormatError, match="no history"):
        read_nights(tmp_path / "h.jsonl")


async def test_a_rebase_keeps_the_old_baseline_and_can_be_read_again(tmp_path: Path) -> None:
    document = frozen()
    starts, heard = ScriptedStarts({"frozen": [110.0], "stock": [130.0]}), Heard()
    result = await night(starts, document, progress=heard, rules=Rules(looks=1), control="auto", rebase=True)
    assert heard.planned == [(6, "rebase", "start")]
    assert len(starts.order) == heard.total
    fresh = rebased(result, "2026-11-02T00:00:00+00:00")
    assert fresh.baseline.starts == result.starts
    assert fresh.baseline.median.ttft_ms is not None
    assert fresh.baseline.median.ttft_ms.p90 == pytest.approx(110.0, rel=0.01)
    assert fresh.previous[0]["baseline"] == document.baseline.to_json()
    assert fresh.control is not None
    assert fresh.control.baseline.starts == len(result.control_rounds)
    save_frozen(tmp_path / "f.json", fresh)
    assert load_frozen(tmp_path / "f.json") == fresh


async def test_a_rebase_without_the_stock_configuration_keeps_no_control_of_another_day() -> None:
    document = frozen()
    starts = ScriptedStarts({"frozen": [110.0]})
    fresh = rebased(await night(starts, document, rules=Rules(looks=1), control="never", rebase=True), "2026-11-02")
    assert starts.order == ["frozen"] * 3
    assert fresh.control is None
    assert document.control is not None
    assert fresh.previous[0]["control"] == document.control.to_json()


async def test_the_advice_to_rebase_is_given_on_any_night_but_a_rebase() -> None:
    document = frozen()
    document = document.model_copy(update={"baseline": document.baseline.model_copy(update={"starts": 1})})
    plain = await night(ScriptedStarts({"frozen": [100.0], "stock": [120.0]}), document)
    assert any("--rebase" in note and "it takes 24 starts" in note for note in plain.notes)
    rebase = await night(ScriptedStarts({"frozen": [100.0], "stock": [120.0]}), document, rebase=True)
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


def test_a_limit_crossed_beyond_doubt_is_a_regression() -> None:
    assert limit("ttft_ms.p90 <= 105", starts_at(100, 101, 99), starts_at(130, 131, 129)) == ("regressed", True)


def failing(*counts: int) -> list[list[Measurement]]:
    return [[round_of(100.0).model_copy(update={"failed_requests": c})] for c in counts]


def test_failed_requests_in_most_starts_are_a_regression_and_in_one_are_not() -> None:
    assert limit("failed_requests == 0", failing(0, 0, 0), failing(1, 2, 0)) == ("regressed", True)
    assert limit("failed_requests == 0", failing(0, 0, 0), failing(0, 2, 0)) == ("ok", False)


def test_a_limit_on_what_was_not_measured_is_inconclusive() -> None:
    assert limit("itl_ms.p99 <= 10", starts_at(100), starts_at(100)) == ("inconclusive", False)


async def test_a_broken_limit_makes_the_night_regressed() -> None:
    document = frozen(constraints=[Constraint.parse("failed_requests == 0")])

    class Failing(ScriptedStarts):
        async def start(self, arm: Arm, number: int) -> Any:
            result = await super().start(arm, number)
            rounds = [r.model_copy(update={"failed_requests": 1}) for r in result.rounds]
            return type(result)(rounds=rounds)

    assert (await night(Failing({"frozen": [100.0]}), document)).verdict == "regressed"


async def test_the_json_document_has_what_the_contract_says() -> None:
    document = json.loads(json.dumps((await night(ScriptedStarts({"frozen": [120.0]}))).to_json()))
    assert document["verdict"] == "regressed"
    assert set(document["metrics"]["ttft_ms.p90"]) >= {"baseline", "now", "change", "ci95", "verdict"}
    assert isinstance(document["suspects"], list)
    assert document["starts"] == {"baseline": 6, "tonight": 6}


async def test_markdown_shows_verdict_table_trend_and_cause() -> None:
    document = frozen()
    nights = [(await night(ScriptedStarts({"frozen": [ms]}), document)).history_line("1") for ms in (100.0, 101.0)]
    text = night_markdown(await night(ScriptedStarts({"frozen": [120.0]}), document, nights=nights), "chat | 70b")
    assert text.startswith("## chunktune: chat \\| 70b: ❌ regressed")
    assert "| **ttft_ms.p90** |" in text
    assert "▁" in text
    row = next(line for line in text.splitlines() if line.startswith("| **ttft_ms.p90** |"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["99.8 ms", "120 ms", "+20 %"]
    assert "| **request_throughput** | 40 req/s | 40.0 req/s | ±0 % | −2.4 % to +2.5 % | 2.1 % |" in text
    assert "### Suspects" in text


async def test_a_simulated_night_says_so() -> None:
    text = night_markdown(await night(ScriptedStarts({"frozen": [100.0]}), frozen(simulated=True)), "x")
    assert "SIMULATED" in text


def test_a_verdict_in_words_has_units_and_one_style_of_percent() -> None:
    judged = MetricVerdict("ttft_ms.p90", True, "ok", 95.12, 94.9, -0.0002, (-0.054, 0.123))
    assert describe(judged) == "94.9 ms against 95.1 ms, ±0 % (95 % interval −5.4 % to +12 %)"
    rate = MetricVerdict("request_throughput", True, "ok", 40.12, 44.0, 0.097)
    assert describe(rate) == "44 req/s against 40.1 req/s, +9.7 %"
    share = MetricVerdict("prefix_hit_rate", False, "ok", 0.9561, 0.9561, 0.0)
    assert describe(share) == "95.6 % against 95.6 %, ±0 %"
    assert describe(MetricVerdict("itl_ms.p99", False, "ok", None, None)) == "not measured"


def test_a_limit_in_words_can_be_told_from_its_value() -> None:
    assert describe_limit(LimitVerdict("ttft_ms.p99 <= 280", "ok", 280.34, broken=True)) == "280.3 ms tonight"
    assert describe_limit(LimitVerdict("memory.peak_fraction <= 0.95", "ok", 0.9612, broken=True)) == "0.9612 tonight"
    assert describe_limit(LimitVerdict("failed_requests == 0", "ok", 1, broken=True)) == "1 tonight"
    assert describe_limit(LimitVerdict("itl_ms.p99 <= 10", "inconclusive", None, broken=False)) == "not measured"


def test_an_incomparable_night_has_no_table() -> None:
    document = frozen()
    result = incomparable(document, document.fingerprint, [])
    assert "not comparable" in night_markdown(result, "x")
    assert result.to_json()["metrics"] == {}


def test_sparkline() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([]) == ""


async def test_junit_cases_follow_the_gate() -> None:
    result = await night(ScriptedStarts({"frozen": [120.0]}))
    cases = {c.name: c for c in verdict_cases(result.metrics, result.limits, result.suspects)}
    assert cases["ttft_ms.p90"].outcome == "failure"
    assert "suspect" in cases["ttft_ms.p90"].detail
    assert cases["request_throughput"].outcome == "passed"
    assert cases["ttft_ms.p50"].outcome == "passed"


def test_junit_carries_no_character_that_xml_cannot() -> None:
    text = junit_xml(
        "a\x00b", [Case("c", "error", "x\x1b[31m<&>", "\x0b")], time_s=1.0, timestamp="2026-01-01T00:00:00"
    )
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "&lt;&amp;&gt;" in text


def test_the_default_number_of_starts() -> None:
    assert [default_starts(n) for n in (1, 2, 3, 6, 12, 30)] == [3, 3, 3, 3, 1, 1]
    assert "--rebase FILE (it takes 12 starts)" in thin_baseline(1, control=False)
    assert thin_baseline(3, control=True) == ""


def test_the_frozen_file_as_a_profile_keeps_what_an_engine_needs() -> None:
    document = frozen()
    profile = profile_of(document, 2)
    assert profile.engine.args == document.engine_args
    assert profile.engine.startup_timeout == document.startup_timeout_s
    assert profile.workload == document.workload


async def compared(starts: ScriptedStarts, progress: Progress) -> Comparison:
    names, gate = ("a", "b"), ["ttft_ms.p90"]
    return await compare_configurations(
        Arm("A", {}), Arm("B", {}), names, gate, starts=2, rules=Rules(), starter=starts, progress=progress
    )


async def test_two_configurations_run_turn_about() -> None:
    starts = ScriptedStarts({"A": [100.0], "B": [130.0]})
    heard = Heard()
    result = await compared(starts, heard)
    assert starts.order[:4] == ["A", "B", "B", "A"]
    assert heard.planned == [(4, "comparison", "start")]
    assert heard.more == [(4, "a suspicion (ttft_ms.p90): 2 more starts of A and of B")]
    assert len(starts.order) == heard.total
    assert result.verdict == "regressed"
    assert result.to_json()["metrics"]["ttft_ms.p90"]["change"] == pytest.approx(0.3, abs=0.01)


async def test_equal_configurations_do_not_differ() -> None:
    starts = ScriptedStarts({"A": [100.0, 101.0], "B": [101.0, 100.0]})
    result = await compared(starts, Silent())
    assert result.verdict == "ok"
    assert len(starts.order) == 4


def test_how_two_configurations_differ() -> None:
    a = frozen(engine_args={"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 2048})
    assert configuration_differences(a, a) == {}
    assert configuration_differences(a, a.model_copy(update={"reuse_budget": ReuseBudget()})) == {}
    b = a.model_copy(
        update={
            "engine_args": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
            "reuse_budget": ReuseBudget(max_cached_blocks=100),
            "engine_env": {},
        }
    )
    assert configuration_differences(a, b) == {
        "max_num_batched_tokens": (512, 2048),
        "max_model_len": (2048, None),
        "env HF_HOME": ("/models", None),
        "reuse_budget.max_cached_blocks": (0, 100),
    }


def test_sides_of_a_comparison() -> None:
    assert [turn(i) for i in range(3)] == [("A", "B"), ("B", "A"), ("A", "B")]
    assert same_kind("http://a", "https://b")
    assert not same_kind("a.json", "b.json")
    zero = [[Measurement(ttft_ms=Latency(p50=1, p90=1, p99=1, mean=1, n=1), prefix_hit_rate=0.0)]]
    assert set(evidence(zero, zero, ["ttft_ms.p90"])) == {"ttft_ms.p90", "ttft_ms.p50", "ttft_ms.p99"}


def test_rolling_view_without_nights_is_empty() -> None:
    view = rolling_view("ttft_ms.p90", 100.0, [])
    assert (view.median, view.drift, view.trend) == (None, None, ())
