"""What arrival times prove: streams that something on the way collected, and those that an engine made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.replies import Answer, Fault, Server, honest, measured, token, usage_chunk
from tests.fakes.scripted_server import DONE


def in_one_piece(answer: Answer) -> Answer:
    """A gateway that keeps everything until the end."""
    end_s = answer.ends_s
    return replace(answer, events=[(end_s, data) for _, data in answer.events])


def flushed(every_s: float) -> Fault:
    """A proxy that passes on what it has, every so often."""

    def fault(answer: Answer) -> Answer:
        return replace(answer, events=[(-(-at_s // every_s) * every_s, data) for at_s, data in answer.events])

    return fault


def in_one_delta(answer: Answer) -> Answer:
    """A server that streams its whole answer as one event."""
    tokens = answer.planned.output_tokens or 0
    end_s = answer.ends_s
    return replace(
        answer, events=[(end_s, token("all of it", "length")), (end_s, usage_chunk(200, tokens, 0)), (end_s, DONE)]
    )


def one_by_one_at_the_end(answer: Answer) -> Answer:
    """Written event by event, but only once the answer is whole."""
    end_s = answer.ends_s
    return replace(answer, events=[(end_s + 2e-5 * i, data) for i, (_, data) in enumerate(answer.events)])


def half_of_them(fault: Fault) -> Fault:
    return lambda answer: fault(answer) if answer.number % 2 else answer


@pytest.mark.parametrize(
    "fault",
    [in_one_piece, flushed(0.2), in_one_delta, one_by_one_at_the_end, half_of_them(in_one_piece)],
    ids=["one write", "a flush every 200 ms", "one delta", "a burst", "every second answer"],
)
def test_a_collected_stream_proves_no_time_between_tokens(fault: Fault) -> None:
    got = Server(fault=fault).round()
    assert got.discarded == ""
    found = measured(got, limits=["itl_ms.p99 <= 50", "ttft_ms.p99 <= 2000"])
    assert (found.itl_ms, found.tpot_ms, found.goodput, found.goodput_share) == (None, None, None, None)
    for name in ("itl_ms", "tpot_ms", "goodput"):
        assert "collects the stream" in found.unmeasured[name]
    assert found.ttft_ms is not None
    assert found.derived["ttft_ms"].startswith("the time of the first piece")
    assert found.e2e_ms is not None


def test_limits_on_other_metrics_are_still_judged() -> None:
    found = measured(Server(fault=in_one_piece).round(), limits=["ttft_ms.p99 <= 2000"])
    assert found.goodput_share == 1.0


@pytest.mark.parametrize(
    ("itl_s", "ttft_s"),
    [(0.02, 0.08), (0.0015, 0.5), (0.004, 0.01)],
    ids=["an H100", "a long wait for a fast model", "a tiny model"],
)
def test_an_honest_stream_proves_them(itl_s: float, ttft_s: float) -> None:
    found = measured(Server(answer=lambda *a, **k: honest(*a, **k, itl_s=itl_s, ttft_s=ttft_s)).round())
    assert found.itl_ms is not None
    assert found.itl_ms.p50 == pytest.approx(itl_s * 1e3)
    assert found.tpot_ms is not None
    assert found.tpot_ms.p50 == pytest.approx(itl_s * 1e3)
    assert "ttft_ms" not in found.derived


def test_a_few_late_packets_are_left_out_and_said() -> None:
    """One answer of 44 in one piece: the others prove the gaps."""
    found = measured(Server(fault=lambda a: in_one_piece(a) if a.number == 20 else a).round())
    assert found.itl_ms is not None
    assert found.itl_ms.p50 == pytest.approx(20)
    assert found.itl_ms.n == sum(n - 1 for n in (6, 8, 10, 12)) * 10 - 5
    assert any("1 of 40 answers arrived in one piece" in w for w in found.warnings)


def test_several_tokens_in_a_delta_are_no_collected_stream() -> None:
    """Speculative decoding: three tokens a step, in one event."""

    def fault(answer: Answer) -> Answer:
        tokens = answer.planned.output_tokens or 0
        steps = [(0.08 + 0.02 * i, token("a b c")) for i in range(-(-tokens // 3))]
        return replace(
            answer, events=[*steps, (1.0, token("", "length")), (1.0, usage_chunk(200, tokens, 0)), (1.0, DONE)]
        )

    found = measured(Server(fault=fault).round())
    assert found.itl_ms is not None
    assert found.itl_ms.p50 == pytest.approx(20)
    assert any("tokens arrive in one piece" in w for w in found.warnings)


def test_what_our_own_loop_held_back_is_no_gateway_s_doing() -> None:
    """A client that is blocked for longer than an answer takes reads its tokens together."""
    server = Server(answer=lambda number, planned, **k: honest(number, planned, **k, itl_s=0.0, ttft_s=0.03))
    assert all(r.collected for r in server.round().records)
    server.lags_ms = (8.0,)
    assert not any(r.collected for r in server.round().records)


@pytest.mark.parametrize("choices", [2, 4])
def test_several_choices_are_timed_one_by_one(choices: int) -> None:
    """`n`: the engine makes a token of each choice in the same step."""

    def fault(answer: Answer) -> Answer:
        each = answer.planned.output_tokens or 0
        events = [
            (0.08 + 0.02 * step, token(finish="length" if step == each - 1 else None, index=index))
            for step in range(each)
            for index in range(choices)
        ]
        end_s = events[-1][0]
        return replace(answer, events=[*events, (end_s, usage_chunk(200, each * choices, 0)), (end_s, DONE)])

    server = Server(fault=fault)
    plan = server.plan()
    ask = plan.lead.request
    lead = replace(plan.lead, request=lambda i: replace(ask(i), output_tokens=choices * (ask(i).output_tokens or 0)))

    def halved(answer: Answer) -> Answer:
        planned = answer.planned
        return fault(replace(answer, planned=replace(planned, output_tokens=(planned.output_tokens or 0) // choices)))

    server.fault = halved
    got = server.round(replace(plan, arrivals=(lead,)))
    assert got.discarded == ""
    assert {r.choices for r in got.records} == {choices}
    found = measured(got)
    assert found.itl_ms is not None
    assert found.tpot_ms is not None
    assert (found.itl_ms.p50, found.itl_ms.p99) == (pytest.approx(20), pytest.approx(20))
    assert found.tpot_ms.p50 == pytest.approx(20)


def test_keep_alives_do_not_shorten_the_time_to_the_first_token() -> None:
    def fault(answer: Answer) -> Answer:
        waiting = [(0.01 * i, token("")) for i in range(1, 8)]
        return replace(answer, events=[*waiting, *answer.events])

    found = measured(Server(fault=fault).round())
    assert found.ttft_ms is not None
    assert found.ttft_ms.p50 == pytest.approx(80)
