"""What a scheduler under live control does, as checks that the simulated one and vLLM's both have to pass.

Standard library and chunktune only: vLLM's Python runs them too. Each check takes a new `Subject`, started with 128
tokens a step, 8 requests at a time, sequences of at most 512 tokens and 64 blocks of 16.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tuner.scheduler.control import LAPSED
from tuner.scheduler.folder import read_report, write_command
from tuner.scheduler.messages import LIVE_VALUES, Command, Report

CHUNK = 128
SLOTS = 8
LENGTH = 512
BLOCK = 16
BLOCKS = 64
BUDGET = {"max_cached_blocks": 20, "min_reuse_ratio": 0.5}


class Subject(Protocol):
    """A scheduler without an engine around it."""

    folder: Path
    now_s: float
    """What its clock says; the checks move it."""

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        """A request arrives."""
        ...

    def step(self) -> int:
        """Plan a step and end the oldest under way; the tokens planned."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no request is left and no step under way."""
        ...


class Talk:
    """Commands to a subject, and requests by the dozen."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._number = 0

    def name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def command(self, op: Any, values: dict[str, Any] | None = None, lease_s: float = 60.0) -> Report:
        """The answer to a command, which a request of one token brings."""
        nonce = self.name()
        write_command(self.subject.folder, Command(nonce, op, values or {}, lease_s if op == "apply" else 0.0))
        self.subject.ask(self.name(), [5], 1)
        report = read_report(self.subject.folder, 0)
        assert report is not None, "no answer"
        assert report.nonce == nonce, report
        return report

    def apply(self, **values: Any) -> Report:
        """A switch that is expected to work."""
        report = self.command("apply", values)
        assert report.state == "applied", report.reason
        self.run_out()
        return report

    def report(self) -> Report:
        """What it has done."""
        report = self.command("report")
        assert report.state == "report", report
        self.run_out()
        return report

    def ask(self, prompt_tokens: int, tokens: int = 4, *, shared: int = 0) -> None:
        """A request whose first `shared` tokens are the same in each."""
        name = self.name()
        own = random.Random(name)
        prompt = [7 + at % 50 for at in range(shared)] + [own.randrange(60, 800) for _ in range(prompt_tokens - shared)]
        self.subject.ask(name, prompt, tokens)

    def run_out(self) -> list[int]:
        """The tokens of each step until nothing is left; steps without any are left out."""
        steps: list[int] = []
        for _ in range(2000):
            if self.subject.idle:
                return [tokens for tokens in steps if tokens]
            self.subject.now_s += 0.05
            steps.append(self.subject.step())
        raise AssertionError("no end")


def check_it_says_what_it_is(subject: Subject) -> None:
    report = Talk(subject).report()
    assert report.engine == 0
    assert set(report.boot) == set(LIVE_VALUES)
    assert report.boot == report.applied
    assert report.boot["max_num_batched_tokens"] == CHUNK
    assert report.boot["max_num_active_seqs"] == SLOTS
    assert report.stock_chunk is not None
    assert report.stock_chunk >= 2048
    assert report.budget_supported
    assert report.lease_left_s == 0


def check_a_command_is_obeyed_before_the_request_that_brings_it(subject: Subject) -> None:
    talk = Talk(subject)
    write_command(subject.folder, Command("n", "apply", {"max_num_batched_tokens": 32}, 60.0))
    talk.ask(100)
    assert talk.run_out()[:4] == [32, 32, 32, 4]
    report = talk.report()
    assert report.applied["max_num_batched_tokens"] == 32
    assert 0 < report.lease_left_s <= 60


def check_every_value_is_read_back(subject: Subject) -> None:
    values = {
        "max_num_batched_tokens": 48,
        "long_prefill_token_threshold": 20,
        "long_prefill_token_threshold_adaptive": True,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": False,
        "watermark": 0.13,
        "max_num_active_seqs": 3,
    }
    report = Talk(subject).apply(**values, reuse_budget=BUDGET)
    applied = dict(report.applied)
    budget = applied.pop("reuse_budget")
    assert applied == values
    assert {name: budget[name] for name in BUDGET} == BUDGET


def check_what_is_not_named_goes_back_to_the_start_s(subject: Subject) -> None:
    talk = Talk(subject)
    boot = talk.report().boot
    talk.apply(max_num_batched_tokens=16, long_prefill_token_threshold=8, watermark=0.2, reuse_budget=BUDGET)
    assert talk.apply(max_num_active_seqs=None).applied == boot


def check_a_switch_under_requests_is_deferred_and_changes_nothing(subject: Subject) -> None:
    talk = Talk(subject)
    talk.apply(max_num_batched_tokens=64)
    talk.ask(300, 20, shared=64)
    talk.ask(300, 20)
    subject.step()
    before = talk.command("report").applied
    report = talk.command("apply", {"max_num_batched_tokens": 16, "reuse_budget": BUDGET})
    assert report.state == "deferred"
    assert "unfinished requests" in report.reason
    assert report.applied == before
    assert max(talk.run_out()) == 64
    talk.ask(100)
    assert talk.run_out()[0] == 64, "what was deferred is not done later, unasked"


def check_a_switch_forgets_every_prefix(subject: Subject) -> None:
    talk = Talk(subject)
    talk.apply()
    talk.ask(200, 1, shared=160)
    assert sum(talk.run_out()) == 200
    talk.ask(200, 1, shared=160)
    assert sum(talk.run_out()) == 40
    talk.apply()
    talk.ask(200, 1, shared=160)
    assert sum(talk.run_out()) == 200


def check_what_cannot_run_is_refused_with_a_sentence(subject: Subject) -> None:
    talk = Talk(subject)
    running = talk.apply(max_num_batched_tokens=64).applied
    for values, says in REFUSED:
        report = talk.command("apply", values)
        assert report.state == "refused", values
        assert says in report.reason, report.reason
        assert report.applied == running
        talk.run_out()
    talk.ask(200)
    assert talk.run_out()[0] == 64


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_num_batched_tokens": 4}, "below max_num_seqs 8"),
    ({"max_num_batched_tokens": 129}, "above 128, which this start is sized for"),
    ({"max_num_batched_tokens": True}, "a whole number from 1, not True"),
    ({"enable_chunked_prefill": False}, "has to be at least max_model_len 512"),
    ({"long_prefill_token_threshold": -1}, "a whole number from 0, not -1"),
    ({"long_prefill_token_threshold": 513}, "above max_model_len 512"),
    ({"max_num_active_seqs": 9}, "above max_num_seqs 8"),
    ({"watermark": 1.0}, "from 0 to below 1, not 1.0"),
    ({"block_size": 32}, "block_size cannot be switched live"),
    ({"reuse_budget": {"min_reuse_ratio": 2}}, "min_reuse_ratio must be a number from 0 to 1"),
    ({"reuse_budget": {"colour": 2}}, "unknown setting 'colour'"),
    # Wrong only in its last value: nothing of it may run.
    ({"max_num_batched_tokens": 32, "watermark": "much"}, "not 'much'"),
)


def check_what_is_counted_begins_with_the_first_request_after_the_switch(subject: Subject) -> None:
    talk = Talk(subject)
    talk.ask(90)
    talk.run_out()
    assert talk.apply(max_num_batched_tokens=64).counters["steps"] == 0
    assert talk.report().counters["steps"] == 0
    talk.ask(100, 1)
    talk.ask(30, 1)
    steps = talk.run_out()
    counters = talk.report().counters
    assert steps == [64, 64, 2]
    assert counters["steps"] == len(steps)
    assert counters["tokens"] == sum(steps)
    assert counters["largest_step_tokens"] == 64
    assert counters["prefill_chunks"] == 4
    assert counters["prefills"] == 2
    assert counters["preemptions"] == 0
    # Nine blocks of the 63 that can be used.
    assert abs(counters["kv_usage_peak"] - 9 / 63) < 1e-9


def check_preemptions_are_counted(subject: Subject) -> None:
    talk = Talk(subject)
    talk.apply(scheduler_reserve_full_isl=False)
    for _ in range(4):
        talk.ask(256, 200)
    steps = talk.run_out()
    counters = talk.report().counters
    assert counters["steps"] == len(steps)
    assert counters["preemptions"] > 0
    assert counters["kv_usage_peak"] > 0.9


def check_the_active_requests_are_limited(subject: Subject) -> None:
    talk = Talk(subject)
    talk.apply(max_num_active_seqs=2)
    for _ in range(5):
        talk.ask(10, 1)
    assert max(talk.run_out()) == 20


def check_the_reuse_budget_is_switched_on_and_off(subject: Subject) -> None:
    talk = Talk(subject)
    assert "preferred_requests" not in talk.apply().counters
    talk.apply(reuse_budget=BUDGET, max_num_active_seqs=2)
    talk.ask(100, 1, shared=80)
    talk.run_out()
    # Three with a prompt of their own are there before the one whose prefix is cached.
    for _ in range(3):
        talk.ask(400, 30)
    talk.ask(100, 1, shared=80)
    talk.run_out()
    assert talk.report().counters["preferred_requests"] == 1
    assert "preferred_requests" not in talk.apply().counters


def check_without_a_renewal_it_goes_back_to_the_start_s_settings(subject: Subject) -> None:
    talk = Talk(subject)
    report = talk.command("apply", {"max_num_batched_tokens": 32, "reuse_budget": BUDGET}, lease_s=30.0)
    assert report.lease_left_s == 30.0
    talk.run_out()
    talk.ask(400, 1)
    assert subject.step() == 32
    subject.now_s += 31.0
    assert subject.step() == CHUNK
    unasked = read_report(subject.folder, 0)
    assert unasked is not None
    assert (unasked.state, unasked.reason) == ("report", LAPSED)
    assert unasked.applied == unasked.boot
    talk.run_out()
    assert talk.report().reason == LAPSED
    assert talk.apply(max_num_batched_tokens=32).reason == ""


def check_a_lease_that_ran_out_while_idle_is_over_before_the_next_request(subject: Subject) -> None:
    talk = Talk(subject)
    talk.apply(max_num_batched_tokens=32)
    subject.now_s += 100.0
    talk.ask(100)
    assert talk.run_out()[0] == 100


def check_a_command_that_others_could_have_written_is_refused(subject: Subject) -> None:
    talk = Talk(subject)
    talk.apply()
    write_command(subject.folder, Command("n", "apply", {"max_num_batched_tokens": 32}, 60.0))
    (subject.folder / "command.json").chmod(0o622)
    talk.ask(100)
    report = read_report(subject.folder, 0)
    assert report is not None
    assert (report.nonce, report.state) == ("", "refused")
    assert "lets others in" in report.reason
    assert talk.run_out()[0] == 100


def check_a_command_that_cannot_be_read_is_refused_once(subject: Subject) -> None:
    talk = Talk(subject)
    write_command(subject.folder, Command("n", "report"))
    (subject.folder / "command.json").write_text("{")
    talk.ask(10)
    report = read_report(subject.folder, 0)
    assert report is not None
    assert (report.nonce, report.state, report.reason) == ("", "refused", "the command is not JSON")
    talk.run_out()
    (subject.folder / "report-0.json").unlink()
    talk.ask(10)
    talk.run_out()
    assert read_report(subject.folder, 0) is None


CHECKS: tuple[Callable[[Subject], None], ...] = tuple(
    check for name, check in sorted(globals().items()) if name.startswith("check_")
)
