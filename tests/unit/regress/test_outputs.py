"""What a run leaves for people and for CI, and which files it never costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.frozen import frozen_of
from tests.unit.regress.test_history import row
from tests.unit.regress.test_run import GATE, frozen, plan_of, played
from tuner.cli.regress import regress
from tuner.errors import UsageError
from tuner.freeze import save_frozen
from tuner.regress.junit import Case, junit_xml, verdict_cases
from tuner.regress.limits import LimitVerdict
from tuner.regress.markdown import run_markdown, sparkline
from tuner.regress.verdict import MetricVerdict
from tuner.regress.words import describe, describe_limit


async def test_markdown_shows_verdict_table_trend_and_cause() -> None:
    history = [await row(100.0), await row(101.0)]
    text = run_markdown(await played([120.0], history=history), "chat | 70b")
    assert text.startswith("## chunktune: chat \\| 70b: ❌ regressed")
    line = next(line for line in text.splitlines() if line.startswith(f"| **{GATE}** |"))
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["99.8 ms", "120 ms", "+20 %"]
    assert "| **request_throughput** | 40 req/s | 40.0 req/s | ±0 % | −2.4 % to +2.5 % | 2.1 % |" in text
    assert "at the freeze 0 of 288 requests, now 0 of 288" in text
    assert "▁" in text
    assert "### Suspects" in text


async def test_a_simulated_run_says_so() -> None:
    assert "SIMULATED" in run_markdown(await played([100.0], document=frozen(simulated=True)), "x")


def test_a_run_that_is_not_comparable_has_no_table() -> None:
    result = plan_of().not_comparable([])
    assert "not comparable" in run_markdown(result, "x")
    assert result.to_json()["metrics"] == {}


def test_sparkline() -> None:
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([]) == ""


async def test_junit_cases_follow_the_gate() -> None:
    result = await played([120.0])
    cases = {c.name: c for c in verdict_cases(result.metrics, result.limits, result.suspects)}
    assert cases[GATE].outcome == "failure"
    assert "suspect" in cases[GATE].detail
    assert cases["request_throughput"].outcome == "passed"
    assert cases["ttft_ms.p50"].outcome == "passed"


def test_junit_carries_no_character_that_xml_cannot() -> None:
    text = junit_xml(
        "a\x00b", [Case("c", "error", "x\x1b[31m<&>", "\x0b")], time_s=1.0, timestamp="2026-01-01T00:00:00"
    )
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "&lt;&amp;&gt;" in text


def test_a_verdict_in_words_has_units_and_one_style_of_percent() -> None:
    judged = MetricVerdict(GATE, True, "ok", 95.12, 94.9, -0.0002, (-0.054, 0.123))
    assert describe(judged) == "94.9 ms against 95.1 ms, ±0 % (95 % interval −5.4 % to +12 %)"
    rate = MetricVerdict("request_throughput", True, "ok", 40.12, 44.0, 0.097)
    assert describe(rate) == "44 req/s against 40.1 req/s, +9.7 %"
    share = MetricVerdict("prefix_hit_rate", False, "ok", 0.9561, 0.9561, 0.0)
    assert describe(share) == "95.6 % against 95.6 %, ±0 %"
    assert describe(MetricVerdict("itl_ms.p99", False, "ok", None, None)) == "not measured"


def test_a_limit_in_words_can_be_told_from_its_value() -> None:
    assert describe_limit(LimitVerdict("ttft_ms.p99 <= 280", "ok", 280.34, broken=True)) == "280.3 ms now"
    assert describe_limit(LimitVerdict("memory.peak_fraction <= 0.95", "ok", 0.9612, broken=True)) == "0.9612 now"
    assert describe_limit(LimitVerdict("failed_requests == 0", "ok", 1, broken=True)) == "1 now"
    assert describe_limit(LimitVerdict("itl_ms.p99 <= 10", "inconclusive", None, broken=False)) == "not measured"


@pytest.mark.parametrize("option", ["junit", "markdown", "history"])
def test_the_frozen_file_is_not_written_over(tmp_path: Path, option: str) -> None:
    path = tmp_path / "f.json"
    save_frozen(path, frozen_of())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is the frozen file itself"):
        regress(path, **{option: path})  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_junit_replaces_junit_only(tmp_path: Path) -> None:
    path, notes = tmp_path / "f.json", tmp_path / "notes.txt"
    save_frozen(path, frozen_of())
    notes.write_text("kept")
    with pytest.raises(UsageError, match="was not written by chunktune"):
        regress(path, junit=notes)
    assert notes.read_text() == "kept"
