"""The file of earlier runs, and what a run takes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.regress.test_run import GATE, frozen, played
from tuner.errors import FileFormatError
from tuner.regress.history import HistoryRow, append_history, evidence_of, frozen_id, read_history, rolling_view
from tuner.regress.rebase import rebased
from tuner.regress.verdict import Rules


async def row(p90: float, time: str = "1", **plan: object) -> HistoryRow:
    return (await played([p90], **plan)).history_row(time)  # type: ignore[arg-type]


async def test_a_row_says_what_was_measured_and_judged() -> None:
    kept = (await played([120.0], [144.0], stock_mode="always")).history_row("2026-11-01")
    assert kept.to_json()["schema"] == "chunktune.history/1"
    assert kept.frozen_id == frozen_id(frozen())
    judged = kept.metrics[GATE]
    assert judged.level == pytest.approx(120.0, rel=0.01)
    assert judged.vs_stock is not None
    assert judged.vs_stock.change == pytest.approx(120 / 144 - 1, abs=0.01)
    assert judged.verdict == kept.verdict
    assert len(kept.values[GATE]) == kept.starts
    assert kept.stock_values[GATE]


async def test_a_change_since_the_last_good_run_is_the_first_suspect() -> None:
    good = await row(100.0, "2026-11-01")
    now = frozen().fingerprint.model_copy(update={"vllm_version": "0.33.0"})
    assert "2026-11-01" in (await played([120.0], now=now, history=[good])).suspects[0]


async def test_two_doubtful_runs_are_judged_together() -> None:
    first = await row(103.2)
    assert first.verdict == "inconclusive"
    assert (await row(103.4, history=[first])).verdict == "regressed"


async def test_a_last_run_on_other_software_is_not_judged_together() -> None:
    last = await row(103.2)
    other = last.model_copy(update={"fingerprint": last.fingerprint.model_copy(update={"driver_version": "1"})})
    now = last.fingerprint.model_copy(update={"driver_version": "2"})
    assert evidence_of(GATE, [[1.0]], [[1.0]], [other], now).last_run == ()
    assert evidence_of(GATE, [[1.0]], [[1.0]], [last], now).last_run != ()


async def test_three_broken_runs_do_not_become_the_new_normal() -> None:
    history: list[HistoryRow] = []
    for day in range(3):
        history.append(await row(140.0, f"day {day}", history=list(history)))
    assert [r.verdict for r in history] == ["regressed"] * 3
    assert (await row(120.0, history=history)).verdict == "regressed"
    good = await played([100.0], history=history)
    assert good.verdict == "ok"
    view = next(v for v in good.rolling if v.metric == GATE)
    assert view.left_out == 3
    assert view.median == pytest.approx(100.0, rel=0.01)


def test_a_rolling_view_of_nothing_is_empty() -> None:
    view = rolling_view(GATE, 100.0, [])
    assert (view.median, view.drift, view.trend) == (None, None, ())


async def test_the_file_survives_a_line_that_was_cut_off(tmp_path: Path) -> None:
    line, path = await row(100.0, "2026-11-01"), tmp_path / "h.jsonl"
    append_history(path, line)
    with path.open("ab") as file:
        file.write(b'{"schema": "chunktune.history/1", "time": "cut')
    append_history(path, line.model_copy(update={"time": "2026-11-02"}))
    before = path.read_bytes()
    rows, damaged = read_history(path, frozen_id(frozen()))
    assert [r.time for r in rows] == ["2026-11-01", "2026-11-02"]
    assert damaged == 1
    assert rows[0] == line
    append_history(path, line)
    assert path.read_bytes().startswith(before)


async def test_a_file_that_was_frozen_anew_has_another_history(tmp_path: Path) -> None:
    result = await played([100.0], rules=Rules(stages=1))
    append_history(tmp_path / "h.jsonl", result.history_row("1"))
    assert read_history(tmp_path / "h.jsonl", frozen_id(rebased(result, "2026-11-02")))[0] == []
    assert read_history(tmp_path / "none.jsonl") == ([], 0)


async def test_rows_of_an_earlier_chunktune_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    append_history(path, await row(100.0))
    with path.open("ab") as file:
        file.write(b'{"schema": "chunktune.night/1"}\n')
    with pytest.raises(FileFormatError, match=r"chunktune\.night/1"):
        read_history(path)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(FileFormatError, match="no history"):
        read_history(tmp_path / "h.jsonl")
