"""When a round cannot count: too many failures, a warm cache, and answers that are not what was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.replies import Answer, Fault, Server, honest, token, usage_chunk
from tests.fakes.scripted_server import DONE, event
from tuner.domain.observation import RequestRecord
from tuner.load.discard import COUNTS, broken_off, judge, warm_start
from tuner.load.plan import Arrivals, PlannedRequest, RoundPlan

PLAN = RoundPlan("k", "/v1/completions", (Arrivals(lambda i: PlannedRequest(b"", 1, 1), 1, 1),))
WARM_UP = RoundPlan("k", "/v1/completions", PLAN.arrivals, phase="warmup", must_start_cold=False)


def one(error: str | None = None, code: str = "cut", cached: int | None = 0, **more: Any) -> RequestRecord:
    return RequestRecord(
        index=0,
        phase="cold",
        intended_s=0.0,
        first_token_s=None if error else 1.0,
        cached_tokens=cached,
        error=error,
        error_code=code if error else None,
        **{"sent_s": 0.0, **more},
    )


def reason(plan: RoundPlan, records: list[RequestRecord], warm: int | None = None, limited: str = "") -> str:
    return judge(plan, records, COUNTS, warm, limited)[1]


@pytest.mark.parametrize(("failed", "discarded"), [(0, False), (10, False), (11, True), (100, True)])
def test_more_than_a_tenth_failed(failed: int, discarded: bool) -> None:
    records = [one("broken") for _ in range(failed)] + [one() for _ in range(100 - failed)]
    assert bool(reason(PLAN, records)) is discarded
    assert bool(reason(WARM_UP, records)) is discarded


def test_the_failures_are_counted_by_kind_and_the_first_is_shown() -> None:
    text = reason(PLAN, [one("HTTP 500: oom", "http_error"), one("x"), one("y")])
    assert "3 of 3" in text
    assert "2 cut" in text
    assert "HTTP 500: oom" in text


def test_a_warm_start_and_a_limited_client() -> None:
    assert "32 tokens cached" in reason(PLAN, [one()], warm=32)
    assert "the client was the limit: slow" in reason(PLAN, [one()], limited="slow")
    assert reason(WARM_UP, [one()], limited="slow") == ""


def test_the_first_request_must_find_nothing() -> None:
    assert warm_start(one(cached=0), [one(cached=0)], 0) is None
    assert warm_start(one(cached=64), [one(cached=64)], 0) == 64
    assert warm_start(one(cached=None), [one(cached=None)], 0) is None
    assert warm_start(one("broken", cached=64), [], 0) is None


def test_a_burst_is_taken_in_any_order() -> None:
    assert warm_start(one(cached=64), [one(cached=64), one(cached=0)], 0) is None
    # One that was sent after the first token proves nothing.
    assert warm_start(one(cached=64), [one(cached=64), one(cached=0, sent_s=1.5)], 0) == 64


def test_what_every_prompt_begins_with_may_be_cached() -> None:
    assert warm_start(one(cached=16), [one(cached=16)], 20) is None
    assert warm_start(one(cached=32), [one(cached=32)], 20) == 32


def test_a_discarded_round_has_a_stable_code() -> None:
    fine = [one() for _ in range(9)]
    assert judge(PLAN, fine, ("engine_died", "it died"), None, "") == ("engine_died", "it died")
    assert judge(PLAN, [one("HTTP 401: key", "auth"), one("x")], COUNTS, None, "")[0] == "auth"
    assert judge(PLAN, [one("HTTP 500: oom", "http_error")] * 3, COUNTS, None, "")[0] == "http_error"
    assert judge(PLAN, [one("x"), one("y", "no_token")], COUNTS, None, "")[0] == "too_many_failures"
    assert judge(PLAN, fine, COUNTS, 32, "slow")[0] == "warm_cache"
    assert judge(PLAN, fine, COUNTS, None, "slow")[0] == "client_limited"


def test_an_honest_server_s_round_counts() -> None:
    assert Server().round().discard_code == ""
    assert Server(rate=20).round().discard_code == ""


def aborted(reason: str, after: int = 2) -> Fault:
    """Ends every second answer after some tokens, with this finish reason."""

    def fault(answer: Answer) -> Answer:
        return honest(answer.number, answer.planned, tokens=after, finish=reason) if answer.number % 2 else answer

    return fault


@pytest.mark.parametrize("finish", ["abort", "error", "content_filter", "repetition", "timeout", "ABORT"])
def test_answers_that_end_abnormally_are_failures(finish: str) -> None:
    got = Server(fault=aborted(finish)).round()
    failed = [r for r in got.records if not r.ok]
    assert {r.error_code for r in failed} == {"abnormal_end"}
    assert all(r.finish_reason == finish and r.ttft_ms is None for r in failed)
    assert got.discard_code == "too_many_failures"
    assert f"after 2 tokens, with finish_reason '{finish}'" in got.discarded


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls", "eos_token", "LENGTH"])
def test_normal_ends_are_none(finish: str) -> None:
    def fault(answer: Answer) -> Answer:
        return honest(answer.number, answer.planned, finish=finish)

    assert Server(fault=fault).round().discarded == ""


def capped(most: int, finish: str = "stop") -> Fault:
    """No answer is longer than this."""

    def fault(answer: Answer) -> Answer:
        tokens = min(most, answer.planned.output_tokens or 0)
        return honest(answer.number, answer.planned, tokens=tokens, finish=finish)

    return fault


def shorter(every: int) -> Fault:
    """One answer of so many has a token less than asked for."""

    def fault(answer: Answer) -> Answer:
        if answer.number % every:
            return answer
        return honest(answer.number, answer.planned, tokens=(answer.planned.output_tokens or 2) - 1, finish="stop")

    return fault


def without_usage(fault: Fault) -> Fault:
    def both(answer: Answer) -> Answer:
        changed = fault(answer)
        return replace(changed, events=[e for e in changed.events if b'"usage"' not in e[1]])

    return both


def longer(answer: Answer) -> Answer:
    return honest(answer.number, answer.planned, tokens=2 * (answer.planned.output_tokens or 0))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (capped(3), "44 of 44 answers are not as long as asked: 132 of 396 output tokens (33 %) were given"),
        (capped(3, "length"), "finish reasons: 44 length"),
        (capped(9), "22 of 44 answers are not as long as asked"),
        (shorter(every=3), "15 of 44 answers"),
        (longer, "792 of 396 output tokens (200 %)"),
        (without_usage(capped(3)), "44 of 44 answers ended before the length that was asked for"),
    ],
)
def test_answers_of_another_length_discard_the_round_with_the_figures(fault: Fault, says: str) -> None:
    got = Server(fault=fault).round()
    assert got.discard_code == "answers_differ"
    assert says in got.discarded
    assert "workload.ignore_eos: false" in got.discarded


def test_a_few_shorter_answers_do_not() -> None:
    assert Server(fault=shorter(every=44)).round().discarded == ""


def test_lengths_are_not_required_of_a_load_without_ignore_eos() -> None:
    server = Server(fault=capped(3))
    assert server.round(server.plan(exact_answers=False)).discarded == ""


def test_nothing_is_said_of_lengths_that_the_server_does_not_tell() -> None:
    assert Server(fault=without_usage(lambda answer: answer)).round().discarded == ""


def test_bodies_that_leave_the_length_open_may_end_anywhere() -> None:
    server = Server(fault=lambda answer: honest(answer.number, answer.planned, tokens=3, finish="stop"))
    plan = server.plan()
    ask = plan.lead.request
    bare = replace(plan.lead, request=lambda i: replace(ask(i), output_tokens=None))
    assert server.round(replace(plan, arrivals=(bare,))).discarded == ""


def prompts_of(tokens: int, every: int = 1) -> Fault:
    """The server counts other prompts than were sent."""

    def fault(answer: Answer) -> Answer:
        return answer if answer.number % every else honest(answer.number, answer.planned, prompt=tokens)

    return fault


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (prompts_of(128), "44 of 44 prompts are not as long as asked: 5,632 of 8,800 prompt tokens (64 %) arrived"),
        (prompts_of(700), "30,800 of 8,800 prompt tokens (350 %)"),
        (prompts_of(100, every=5), "9 of 44 prompts"),
    ],
)
def test_prompts_of_another_length_discard_the_round_with_the_figures(fault: Fault, says: str) -> None:
    got = Server(fault=fault).round()
    assert got.discard_code == "prompts_differ"
    assert says in got.discarded


def test_a_token_more_at_a_prompt_s_end_is_no_other_prompt() -> None:
    assert Server(fault=prompts_of(202), prompt=200).round().discarded == ""
    assert Server(fault=prompts_of(12), prompt=10).round().discarded == ""


def test_estimated_prompts_are_not_compared() -> None:
    server = Server(fault=prompts_of(128))
    assert server.round(server.plan(exact_prompts=False)).discarded == ""


def breaks_after(most: int, how: str) -> Fault:
    """Answers of more than `most` tokens break off there."""

    def fault(answer: Answer) -> Answer:
        if (answer.planned.output_tokens or 0) <= most:
            return answer
        events = answer.events[:most]
        if how == "error event":
            return replace(
                answer, events=[*events, (1.0, event({"error": {"message": "EngineCore died"}})), (1.0, DONE)]
            )
        if how == "cut":
            return replace(answer, events=events, failure=("cut", "the server closed the connection, in mid-stream"))
        return replace(answer, events=[*events, (1.0, DONE)])

    return fault


@pytest.mark.parametrize("how", ["error event", "cut", "no finish reason"])
def test_the_longest_answers_do_not_vanish_from_the_figures(how: str) -> None:
    """Few enough to be below the share of failures that a round may have."""
    few = Server(outputs=(6,) * 14 + (30,), fault=breaks_after(16, how)).round()
    assert few.discard_code == "answers_differ"
    assert "every answer of more than 6 tokens broke off (2 of 44)" in few.discarded
    assert "workload.ignore_eos: false" in few.discarded
    many = Server(outputs=(6, 30), fault=breaks_after(16, how)).round()
    assert many.discard_code == "too_many_failures"
    assert "workload.ignore_eos: false" in many.discarded


def test_failures_that_have_nothing_to_do_with_length_say_nothing_of_it() -> None:
    assert broken_off([one("x", deltas=2, output_tokens_planned=8)] * 3) == ""
    mixed = [one(output_tokens_planned=n) for n in (8, 9, 10)] + [one("x", deltas=1, output_tokens_planned=9)] * 2
    assert broken_off(mixed) == ""


def refused(answer: Answer) -> Answer:
    if answer.number % 12 != 5:
        return answer
    return Answer(answer.number, answer.planned, [(0.001, b'{"error": {"message": "overloaded"}}')], 503)


def test_a_server_that_refuses_some_is_kept_with_its_failures() -> None:
    got = Server(fault=refused).round()
    assert [r.error_code for r in got.records if not r.ok] == ["http_error"] * 4
    assert got.discarded == ""


def test_several_choices_are_asked_for_together() -> None:
    """`n` of 2 doubles what is asked for, not what each answer is compared with."""

    def fault(answer: Answer) -> Answer:
        count = answer.planned.output_tokens or 0
        events = [
            (0.08 + 0.02 * i, token(finish="length" if i == count // 2 - 1 else None, index=choice))
            for i in range(count // 2)
            for choice in (0, 1)
        ]
        return replace(answer, events=[*events, (1.0, usage_chunk(200, count, 0)), (1.0, DONE)])

    assert Server(fault=fault).round().discarded == ""
