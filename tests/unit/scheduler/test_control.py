"""The state machine of live control with a scheduler that fails; `tests/contract/live` has the rest."""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.fakes.live_engine import BOOT, FakeLiveEngine
from tuner.scheduler.control import LAPSED, StepCounts
from tuner.scheduler.messages import Command, MessageError, Report


class Line:
    """A channel in memory."""

    def __init__(self) -> None:
        self.commands: deque[Command | str] = deque()
        self.reports: list[Report] = []

    def take(self) -> Command | None:
        if not self.commands:
            return None
        command = self.commands.popleft()
        if isinstance(command, str):
            raise MessageError(command)
        return command

    def put(self, report: Report) -> None:
        self.reports.append(report)


def engine(**faults: Any) -> tuple[FakeLiveEngine, Line]:
    line = Line()
    return FakeLiveEngine(line, **faults), line


def sent(line: Line, to: FakeLiveEngine, values: dict[str, Any], lease_s: float = 60.0) -> Report:
    line.commands.append(Command("n", "apply", values, lease_s))
    to.request_comes()
    return line.reports[-1]


def test_a_scheduler_that_breaks_half_way_runs_what_it_ran_before() -> None:
    live, line = engine(fails_at=256)
    assert sent(line, live, {"max_num_batched_tokens": 512, "watermark": 0.1}).state == "applied"
    report = sent(line, live, {"max_num_batched_tokens": 256, "watermark": 0.2})
    assert (report.state, report.reason) == ("refused", "the scheduler broke")
    assert (report.applied["max_num_batched_tokens"], report.applied["watermark"]) == (512, 0.1)


def test_a_cache_that_cannot_be_reset_defers_the_switch() -> None:
    live, line = engine(blocks_in_use=1)
    report = sent(line, live, {"max_num_batched_tokens": 512})
    assert report.state == "deferred"
    assert "cannot be reset" in report.reason
    assert report.applied == BOOT
    assert sent(line, live, {"max_num_batched_tokens": 512}).state == "applied"


def test_the_report_has_what_the_scheduler_says_and_not_what_was_asked_for() -> None:
    live, line = engine(ignores="max_num_batched_tokens")
    report = sent(line, live, {"max_num_batched_tokens": 512})
    assert (report.state, report.applied["max_num_batched_tokens"]) == ("applied", 8192)


def test_what_this_vllm_cannot_switch_is_refused_by_name() -> None:
    line = Line()
    older = {name: value for name, value in BOOT.items() if name != "max_num_active_seqs"}
    live = FakeLiveEngine(line, values=older)
    report = sent(line, live, {"max_num_batched_tokens": 512, "max_num_active_seqs": 4})
    assert (report.state, report.reason) == ("refused", "this vLLM cannot switch max_num_active_seqs live")
    assert live.values == older
    assert "max_num_active_seqs" not in sent(line, live, {"max_num_batched_tokens": 512}).boot


def test_a_budget_that_cannot_be_served_is_refused_with_the_reason_and_none_is_taken() -> None:
    live, line = engine(budget_reason="no budget here")
    report = sent(line, live, {"reuse_budget": {"min_reuse_ratio": 0.5}})
    assert (report.state, report.reason) == ("refused", "no budget here")
    assert not report.budget_supported
    assert sent(line, live, {"reuse_budget": {"min_reuse_ratio": 0}}).state == "applied"


def test_what_cannot_be_read_is_refused_without_a_nonce() -> None:
    live, line = engine()
    sent(line, live, {})
    line.commands.append("this is not to be trusted")
    live.request_comes()
    assert (line.reports[-1].nonce, line.reports[-1].reason) == ("", "this is not to be trusted")


def test_counting_begins_on_an_idle_engine_only() -> None:
    live, line = engine()
    sent(line, live, {})
    live.requests = 1
    live.request_comes()
    live.step(10)
    live.requests = 0
    live.budget_counters = {"held_requests": 5.0}
    live.request_comes()
    live.step(20, preemptions=1, usage=0.5)
    live.step(0, preemptions=2, usage=0.25)
    live.requests = 1
    line.commands.append(Command("m", "report"))
    live.request_comes()
    expected = StepCounts(steps=1, tokens=20, largest_step_tokens=20, preemptions=3, kv_usage_peak=0.5)
    assert line.reports[-1].counters == vars(expected)


def test_the_budget_s_counters_are_in_the_report() -> None:
    live, line = engine()
    live.request_comes()
    live.budget_counters = {"held_requests": 2.0}
    line.commands.append(Command("m", "report"))
    live.request_comes()
    assert line.reports[-1].counters["held_requests"] == 2.0


def test_each_switch_renews_the_lease_and_a_report_does_not() -> None:
    live, line = engine()
    sent(line, live, {"max_num_batched_tokens": 512}, lease_s=10.0)
    live.now_s = 6.0
    sent(line, live, {"max_num_batched_tokens": 256}, lease_s=10.0)
    live.now_s = 12.0
    line.commands.append(Command("m", "report"))
    live.request_comes()
    assert line.reports[-1].lease_left_s == 4.0
    live.now_s = 16.0
    live.step(1)
    assert (line.reports[-1].reason, line.reports[-1].lease_left_s) == (LAPSED, 0.0)
    assert live.values == BOOT
    live.step(1)
    assert len(line.reports) == 4


def test_an_idle_engine_forgets_its_cache_when_the_lease_is_over_and_a_busy_one_cannot() -> None:
    live, line = engine()
    sent(line, live, {}, lease_s=1.0)
    live.now_s = 2.0
    live.request_comes()
    assert live.resets == 2
    sent(line, live, {}, lease_s=1.0)
    live.now_s = 4.0
    live.step(1)
    assert live.resets == 3
