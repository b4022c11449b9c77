"""What one streamed request shows of a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.replies import Answer, Fault, Server, honest, token, usage_chunk
from tests.fakes.scripted_server import DONE
from tuner.doctor.line import Line
from tuner.doctor.server import judge_counters
from tuner.doctor.stream import TOKENS, judge_stream
from tuner.domain.observation import CounterDelta


def look(fault: Fault = lambda answer: answer, *, ignore_eos: bool = True) -> list[Line]:
    observation = Server(requests=1, concurrency=1, outputs=(TOKENS,), fault=fault).round()
    return judge_stream(observation.records[-1], ignore_eos=ignore_eos)


def test_an_honest_server() -> None:
    (line,) = look()
    assert line.status == "ok"
    assert line.message == "32 tokens in 32 pieces, TTFT 80 ms, TPOT 20.0 ms"


def in_one_piece(answer: Answer) -> Answer:
    return replace(answer, events=[(answer.ends_s, data) for _, data in answer.events])


def test_a_gateway_that_collects_the_stream() -> None:
    (line,) = look(in_one_piece)
    assert line.status == "wrong"
    assert "in one piece, or in few, after 700 ms" in line.message
    assert "buffering" in line.hint


def ends(tokens: int, reason: str) -> Fault:
    return lambda answer: honest(answer.number, answer.planned, tokens=tokens, finish=reason)


@pytest.mark.parametrize(("tokens", "reason"), [(3, "stop"), (16, "length"), (40, "length")])
def test_an_answer_of_another_length(tokens: int, reason: str) -> None:
    (line,) = look(ends(tokens, reason))
    assert line.status == "wrong"
    assert f"{tokens} were given (finish reason {reason})" in line.message
    assert "workload.ignore_eos: false" in line.hint
    assert look(ends(tokens, reason), ignore_eos=False)[0].status == "ok"


def test_an_abnormal_end() -> None:
    (line,) = look(ends(2, "abort"))
    assert line.status == "wrong"
    assert "'abort'" in line.message


def test_an_answer_that_breaks_off() -> None:
    (line,) = look(lambda answer: replace(answer, events=answer.events[:16], failure=("cut", "lost in mid-stream")))
    assert line.status == "wrong"
    assert "lost in mid-stream" in line.message
    assert "ignore_eos" in line.hint


def test_no_usage() -> None:
    (line,) = look(lambda answer: replace(answer, events=[e for e in answer.events if b'"usage"' not in e[1]]))
    assert line.status == "warning"
    assert "output tokens" in line.message


def test_several_answers_that_nobody_asked_for() -> None:
    def fault(answer: Answer) -> Answer:
        both = [
            (0.1 + 0.02 * i, token(finish="length" if i == 31 else None, index=k)) for i in range(32) for k in (0, 1)
        ]
        return replace(answer, events=[*both, (1.0, usage_chunk(200, 64, 0)), (1.0, DONE)])

    (line,) = look(fault)
    assert line.status == "warning"
    assert "2 answers" in line.message


def test_keep_alives_are_named() -> None:
    (line,) = look(lambda answer: replace(answer, events=[(0.01, token("")), *answer.events]))
    assert line.status == "ok"
    assert "1 empty deltas besides" in line.message


def test_counters_of_others() -> None:
    assert judge_counters(CounterDelta(), sent=10, answered=10) == []
    (line,) = judge_counters(CounterDelta(requests_finished=10.0, requests_left=0.0), sent=10, answered=10)
    assert line.status == "ok"
    for finished in (4.0, 31.0):
        (line,) = judge_counters(CounterDelta(requests_finished=finished), sent=10, answered=10)
        assert line.status == "warning"
        assert f"finished {finished:.0f} requests" in line.message
