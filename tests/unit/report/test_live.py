from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tests.fakes import studies
from tuner.clock import FakeClock
from tuner.domain.experiment import Purpose, Results, Round, SettingId, Start
from tuner.domain.setting import CHUNK_KNOB, STOCK, Setting
from tuner.errors import Interrupted
from tuner.experiment.design import Named, StartPlan, Step
from tuner.report.live import SweepView

NAMED = [Named("stock", STOCK), *(Named(n, Setting(knobs={CHUNK_KNOB: 256 << n})) for n in range(3))]
CYCLES: list[list[SettingId]] = [["stock", 0, 1, 2], ["stock", 0, 1, 2], ["stock", 0, 1]]
"""Setting 2, chunk 1024, is left out of the third cycle."""


def plan(*names: SettingId, purpose: Purpose = "search", label: str = "search") -> StartPlan:
    settings = tuple(n for n in NAMED if n.id in names)
    return StartPlan(purpose, label, {}, settings, live=True)


def named(name: SettingId) -> Named:
    return next(n for n in NAMED if n.id == name)


def row(name: SettingId, cycle: int, position: int = 0, p90: float = 100.0) -> Round:
    measured = studies.measurement(p90)
    return Round(
        start=1, round=1, cycle=cycle, position=position, setting=name, state="kept", load_s=5, measurement=measured
    )


def measure(view: SweepView, clock: FakeClock, start: Start, cycles: list[list[SettingId]] = CYCLES) -> None:
    """A start of 48 s, then its cycles at five seconds a round."""
    clock.advance(48)
    view.start_ready(start)
    for cycle, names in enumerate(cycles):
        for position, name in enumerate(names):
            view.round_began(start, Step(named(name), cycle, position), 1)
            view.round_progress(100, 232)
            clock.advance(5)
            view.round_ended(row(name, cycle, position, 100.0 + cycle), named(name))


def view_on(width: int = 100, *, terminal: bool, quiet: bool = False) -> tuple[SweepView, io.StringIO, FakeClock]:
    out, clock = io.StringIO(), FakeClock()
    console = Console(file=out, width=width, height=40, force_terminal=terminal, color_system=None)
    return SweepView(console, quiet=quiet, clock=clock), out, clock


def screen(view: SweepView, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view.screen())
    return out.getvalue()


def test_without_a_terminal_every_event_is_one_line() -> None:
    view, out, clock = view_on(200, terminal=False)
    view.expected(5, 600.0)
    view.start_began(1, plan("stock", 0, 1, 2))
    measure(view, clock, studies.start(1))
    view.stage("stopping the engine")
    view.start_ended(studies.start(1))
    view.message("the search is done")
    view.close()
    view.close()
    lines = out.getvalue().splitlines()
    assert lines[:4] == [
        "expected: 5 starts, about 10 min 00 s",
        "start 1, search with 4 settings",
        "  ready after 1 min 50 s",
        "  cycle 1, stock: TTFT P90 100 ms in 5 s",
    ]
    assert len(lines) == 3 + 11 + 3
    assert lines[-3:] == [
        "  stopping the engine",
        "start 1, search: completed after 4 min 00 s",
        "the search is done",
    ]
    assert "\x1b" not in out.getvalue()


def test_a_terminal_shows_settings_the_running_round_and_the_time_left() -> None:
    view, _, clock = view_on(terminal=True)
    with view:
        view.expected(4, 500.0, "4 starts, as assumed")
        view.start_began(1, plan("stock", 0, 1, 2))
        measure(view, clock, studies.start(1), CYCLES[:2])
        view.expected(5, 600.0, "5 starts, as measured so far")
        view.round_began(studies.start(1), Step(named(1), 2, 0), 2)
        view.stage("warming up")
        view.round_progress(64, 64)
        assert "start 1, search: warming up" in screen(view)
        view.round_progress(58, 232)
        text = screen(view)
    assert re.search(r"^ *2 +chunk 1024 +2 +10\d ms", text, re.MULTILINE)
    assert "start 1, search: cycle 3, round 1, chunk 512, attempt 2" in text
    assert "58/232 requests" in text
    assert "5 starts, as measured so far" in text
    assert "as assumed" not in text
    assert "0 starts of about 5 done" in text
    assert "about 8 min 32 s left" in text


def test_a_setting_left_out_of_a_whole_cycle_moves_down_and_says_so() -> None:
    view, _, clock = view_on(terminal=True)
    with view:
        view.start_began(1, plan("stock", 0, 1, 2))
        measure(view, clock, studies.start(1))
        assert "left out" not in screen(view), "its turn in this cycle may still come"
        view.round_began(studies.start(1), Step(named("stock"), 3, 0), 1)
        assert re.findall(r"^ *(\w+) +.*left out", screen(view), re.MULTILINE) == ["2"]
        view.start_began(2, plan("stock", 1, purpose="final", label="final 1 of 3"))
        assert re.findall(r"^ *(\w+) +.*left out", screen(view), re.MULTILINE) == ["0", "2"]


def test_starts_of_one_setting_each_eliminate_nobody() -> None:
    view, _, _ = view_on(terminal=True)
    single = studies.start(1, "single")
    with view:
        for cycle, name in enumerate(("stock", 0, 1)):
            view.start_began(cycle + 1, plan(name, purpose="single"))
            view.round_began(single, Step(named(name), cycle, 0), 1)
            view.round_ended(row(name, cycle), named(name))
            view.start_ended(single)
        assert "left out" not in screen(view)
        assert "3 starts done" in screen(view)


def test_quiet_keeps_failures_and_warnings() -> None:
    view, out, clock = view_on(terminal=True, quiet=True)
    view.expected(5, None, "about 5 starts")
    view.start_began(1, plan("stock"))
    measure(view, clock, studies.start(1), [["stock"]])
    view.start_ended(studies.start(1))
    view.message("as it should be", routine=True)
    assert out.getvalue() == ""
    view.message("a warning")
    view.start_began(2, plan(0, label="chunk 256"))
    view.start_ended(studies.failed(2, NAMED[1], "engine_failed", "port_in_use", "it is taken", "Free it."))
    assert out.getvalue().splitlines() == [
        "a warning",
        "start 2, chunk 256: engine failed after 31 s: port_in_use: it is taken. Free it.",
    ]


def test_a_discarded_round_is_told_and_not_counted() -> None:
    view, out, _ = view_on(200, terminal=False)
    view.round_ended(studies.discarded(row(0, 0), "the prefix was cached"), named(0))
    view.round_ended(row(0, 0), named(0))
    assert "cycle 1, chunk 256: round discarded: the prefix was cached" in out.getvalue()
    assert re.search(r"0 +chunk 256 +1 +100 ms", screen(view))


def test_a_continued_study_shows_what_was_measured() -> None:
    view, _, _ = view_on(terminal=False)
    earlier = studies.start(1, "search", {n.id: n.setting for n in NAMED[:2]})
    view.resumed(Results([earlier], [row("stock", 0), row(0, 0), row("stock", 1)]))
    assert re.search(r"stock +stock +2 +100 ms", screen(view))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_keeps_the_time_left(width: int) -> None:
    view, _, clock = view_on(width, terminal=True)
    with view:
        view.expected(5, 600.0)
        view.start_began(1, plan("stock", 0, 1, 2))
        clock.advance(24)
        lines = screen(view, width).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width
    assert lines[0].rstrip().endswith("about 9 min 36 s left")
    assert lines[1].rstrip().endswith("24 s")


def test_a_short_terminal_keeps_the_settings_in_question() -> None:
    out = io.StringIO()
    view = SweepView(Console(file=out, width=80, height=10, force_terminal=True), clock=FakeClock())
    for number in range(40):
        view.round_ended(row(number, 0), Named(number, Setting(knobs={CHUNK_KNOB: 16 * (number + 1)})))
    text = screen(view)
    assert "and 36 more" in text
    assert len(text.splitlines()) <= 10


def test_an_expectation_that_is_over_is_said() -> None:
    view, _, clock = view_on(terminal=True)
    view.expected(2, 60.0)
    clock.advance(90)
    assert "longer than expected" in screen(view)
    assert view.time_left_s() is None


def test_an_interruption_leaves_the_table_on_the_screen() -> None:
    view, out, clock = view_on(terminal=True)

    def interrupted() -> None:
        with view:
            view.start_began(1, plan("stock", 0))
            measure(view, clock, studies.start(1), [["stock", 0]])
            raise Interrupted("interrupted", "")

    with pytest.raises(Interrupted):
        interrupted()
    left = out.getvalue().rpartition("\x1b")[2]
    assert len(re.findall(r"(stock +stock|0 +chunk 256) +1 ", left)) == 2


def test_words_of_an_engine_cannot_steer_the_terminal() -> None:
    view, out, _ = view_on(200, terminal=False)
    view.message("\x1b[2Jgone [bold]x[/]")
    assert out.getvalue() == "?[2Jgone [bold]x[/]\n"
