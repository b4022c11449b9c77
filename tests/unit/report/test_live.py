from __future__ import annotations

import io
import re

import pytest
from rich.console import Console, Group

from tests.fakes import studies
from tuner.clock import FakeClock
from tuner.errors import Interrupted
from tuner.report.live import SweepView
from tuner.report.pace import share_done, step_left_s, time_left_s


def plain_view(clock: FakeClock, *, quiet: bool = False) -> tuple[SweepView, io.StringIO]:
    out = io.StringIO()
    return SweepView(Console(file=out, width=200), quiet=quiet, clock=clock), out


def run_two_trials(view: SweepView, clock: FakeClock) -> None:
    view.study_started(4)
    for number in range(2):
        view.trial_started(number, "stock")
        view.stage("starting the engine")
        clock.advance(48)
        view.stage("round 1 of 3")
        for done in (100, 232):
            clock.advance(10)
            view.round_progress(done, 232)
        view.trial_finished(studies.trial(number, {}, 142.0, role="baseline", label="stock"))


def test_without_a_terminal_every_event_is_one_line() -> None:
    clock = FakeClock()
    view, out = plain_view(clock)
    run_two_trials(view, clock)
    view.message("two trials done")
    view.close()
    view.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "study: 4 trials"
    assert lines[1] == "[1/4] trial 0, stock: started"
    assert "  starting the engine" in lines
    assert "  round 1 of 3: 232 requests in 20 s" in lines
    assert any(
        line.startswith("[2/4] trial 1, stock: TTFT P90 1") and line.endswith("3 min 00 s left") for line in lines
    )
    assert lines[-1] == "two trials done"
    assert "\x1b" not in out.getvalue()


def test_what_is_no_trial_is_counted_by_its_own_word_and_grows_with_a_reason() -> None:
    clock = FakeClock()
    view, out = plain_view(clock)
    view.study_started(1, kind="night", unit="start")
    for number in range(1, 4):
        view.trial_started(number, f"start {number}, frozen")
        clock.advance(60)
        view.trial_finished(studies.trial(number, {}, 142.0, label=f"start {number}, frozen"))
        if number == 1:
            view.replanned(3, "a suspicion: 2 more starts")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["night: 1 start", "[1/1] start 1, frozen: started"]
    assert lines[3:5] == ["a suspicion: 2 more starts", "[2/3] start 2, frozen: started"]
    assert lines[5].startswith("[2/3] start 2, frozen: TTFT P90 1")
    assert lines[5].endswith("1 min 30 s left")
    assert "trial" not in out.getvalue()


def test_starts_on_a_terminal_do_not_compete() -> None:
    clock = FakeClock()
    view = SweepView(Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None), clock=clock)
    screen = io.StringIO()
    with view:
        view.study_started(2, kind="night", unit="start")
        view.stage("warming up")
        Console(file=screen, width=100).print(view._screen())
        view.trial_finished(studies.trial(1, {}, 142.0, label="start 1, frozen"))
        Console(file=screen, width=100).print(view._screen())
    text = screen.getvalue()
    assert "warming up" in text
    assert "1 of 2 starts" in text
    assert "start 1, frozen" in text
    assert "trial" not in text
    assert "best so far" not in text


def test_quiet_keeps_failures_and_warnings() -> None:
    clock = FakeClock()
    view, out = plain_view(clock, quiet=True)
    run_two_trials(view, clock)
    view.message("as it should be", routine=True)
    assert out.getvalue() == ""
    view.message("a warning")
    view.trial_finished(studies.failed(2, 16, "port_in_use", "somebody listens there"))
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == ["a warning", "[3/4] trial 2"]


def test_one_trial_is_one_trial() -> None:
    view, out = plain_view(FakeClock())
    view.study_started(1)
    assert out.getvalue() == "study: 1 trial\n"


def test_a_continued_study_counts_on_and_shows_what_was_measured() -> None:
    clock = FakeClock()
    earlier = [studies.trial(0, {}, 142.0, role="baseline", label="stock")]
    view, out = plain_view(clock)
    view.study_started(4, earlier)
    view.trial_started(2, "chunk 512")
    view.replanned(3)
    view.trial_finished(studies.trial(2, {}, 150.0, label="chunk 512"))
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["study: 4 trials", "continuing: 1 trial measured earlier", "[2/4] trial 2, chunk 512: started"]
    assert lines[3].startswith("[2/3] trial 2, chunk 512: TTFT P90")
    assert "left" in lines[3], "an earlier trial tells how long one takes"
    screen = io.StringIO()
    Console(file=screen, width=100).print(view._screen())
    assert re.search(r"0 +stock +\S+ ms +best so far", screen.getvalue())


@pytest.mark.parametrize(
    ("violation", "said"),
    [
        ("ttft_ms.p90 <= 100: 142.3", "outside ttft_ms.p90 <= 100 (142 ms)"),
        ("ttft_ms.p90 <= 142: 142.3", "outside ttft_ms.p90 <= 142 (142.3 ms)"),
        ("goodput >= 3: not measured (no limit)", "outside goodput >= 3 (not measured (no limit))"),
    ],
)
def test_a_violation_has_its_value_in_its_unit(violation: str, said: str) -> None:
    view, out = plain_view(FakeClock())
    found = studies.trial(0, {}, 142.3, label="stock")
    assert found.median is not None
    assert found.median.ttft_ms is not None
    latency = found.median.ttft_ms.model_copy(update={"p90": 142.3})
    median = found.median.model_copy(update={"ttft_ms": latency, "goodput": None})
    view.study_started(1)
    view.trial_finished(found.model_copy(update={"median": median, "violations": [violation]}))
    assert said in out.getvalue()


def test_a_failed_trial_says_why() -> None:
    clock = FakeClock()
    view, out = plain_view(clock)
    view.study_started(1)
    view.trial_started(0, "chunk 16")
    view.trial_finished(studies.failed(0, 16, "invalid_combination", "16 is below 128"))
    assert "engine failed: invalid_combination: 16 is below 128" in out.getvalue()


def test_a_terminal_shows_bar_forecast_and_best() -> None:
    clock = FakeClock()
    out = io.StringIO()
    view = SweepView(Console(file=out, width=100, force_terminal=True, color_system=None), clock=clock)
    with view:
        run_two_trials(view, clock)
        view.trial_started(2, "chunk 512")
        view.stage("starting the engine")
        clock.advance(24)
        screen = io.StringIO()
        Console(file=screen, width=100).print(view._screen())
    text = screen.getvalue()
    assert "2 of 4 trials" in text
    assert "about 2 min 36 s left" in text
    assert "trial 2, chunk 512: starting the engine" in text
    assert "24 s, about 24 s left" in text
    assert text.count("best so far") == 1


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_keeps_the_count_and_the_time_left(width: int) -> None:
    clock = FakeClock()
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    view = SweepView(console, clock=clock)
    with view:
        run_two_trials(view, clock)
        view.trial_started(2, "chunk 512, long_prefill_token_threshold 256")
        view.stage("starting the engine")
        clock.advance(24)
        shown = io.StringIO()
        Console(file=shown, width=width).print(Group(view._overall(), view._step()))
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("2 of 4 trials ")
    assert lines[0].rstrip().endswith("about 2 min 36 s left")
    assert lines[1].rstrip().endswith("24 s, about 24 s left")


def test_an_interruption_leaves_the_finished_trials_on_the_screen() -> None:
    clock = FakeClock()
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)

    def interrupted() -> None:
        with SweepView(console, clock=clock) as view:
            run_two_trials(view, clock)
            raise Interrupted("interrupted", "")

    with pytest.raises(Interrupted):
        interrupted()
    left = out.getvalue().rpartition("\x1b")[2]
    assert len(re.findall(r"^ +[01] +stock ", left, re.MULTILINE)) == 2


def test_forecast_needs_a_finished_trial_and_ignores_an_outlier() -> None:
    assert time_left_s([], 3, 5) is None
    assert time_left_s([90, 90, 900], 2, 30) == 150
    assert time_left_s([90], 2, 500) == 90
    assert time_left_s([90], 0, 0) == 0


def test_step_forecasts() -> None:
    assert step_left_s(10, 0, 100) is None
    assert step_left_s(10, 25, 100) == 30
    assert step_left_s(10, 120, 100) == 0
    assert share_done(10, []) is None
    assert share_done(10, [20]) == 0.5
    assert share_done(100, [20]) == 0.99
