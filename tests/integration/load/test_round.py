"""A round against a server whose every byte is ours; each fault of the field as a kind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_server import (
    DONE,
    Asked,
    Reply,
    ScriptedServer,
    chat_chunk,
    stream,
    text_chunk,
    usage_chunk,
)
from tuner.domain.observation import RequestRecord, RoundObservation
from tuner.domain.workload import MixedWorkload, SharedPrefixWorkload, WorkloadClass
from tuner.load.drive import drive
from tuner.load.loop import run
from tuner.load.plan import PlannedRequest
from tuner.load.planner import AnyWorkload, Planner
from tuner.load.probe import HELLO, probe
from tuner.load.target import Api, Target


def shared(concurrency: int = 4, requests: int = 20, **more: Any) -> SharedPrefixWorkload:
    lengths = {"system_prompt_tokens": 48, "user_prompt_tokens": (4, 12), "output_tokens": (2, 5)}
    return SharedPrefixWorkload(**{**lengths, "concurrency": concurrency, "requests": requests, **more})


async def planner_for(
    server: ScriptedServer, workload: AnyWorkload, api: Api = "completions"
) -> tuple[Target, Planner]:
    target = Target(server.base_url, api=api)
    planner = await Planner.open(target, workload, await probe(target), seed=1, base_dir=Path())
    server.asked.clear()
    server.max_in_flight = 0
    return target, planner


def counts(got: RoundObservation) -> bool:
    """The round counts, as far as the server is concerned: on a busy machine the client may well be the limit."""
    return not got.discarded or got.discarded.startswith("the client was the limit")


async def one_round(
    server: ScriptedServer, workload: AnyWorkload, api: Api = "completions", **how: Any
) -> RoundObservation:
    target, planner = await planner_for(server, workload, api)
    return await asyncio.wait_for(drive(target, planner.plan("r1", "a1"), **how), 30)


def in_rounds(behave: Callable[[ScriptedServer, Asked], Any]) -> Callable[[ScriptedServer, Asked], Any]:
    """`behave` for the round alone: the requests of probe and calibration are answered honestly."""

    def either(server: ScriptedServer, asked: Asked) -> Any:
        probing = HELLO in str(asked.body) or asked.tokens == server.tokens_of({"prompt": HELLO})
        return stream(server, asked) if probing else behave(server, asked)

    return either


@pytest.fixture(params=["direct", "proxied"])
def reach(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedServer], Target]:
    """Straight, and through a proxy that the environment names."""

    def target(server: ScriptedServer) -> Target:
        if request.param == "direct":
            return Target(server.base_url)
        monkeypatch.setenv("http_proxy", server.base_url)
        monkeypatch.delenv("no_proxy", raising=False)
        return Target("http://model.example.org")

    return target


async def test_a_closed_loop_begins_with_a_burst_and_goes_on_without_a_drain(
    reach: Callable[[ScriptedServer], Target],
) -> None:
    behave = lambda s, a: stream(s, a, ttft_s=0.01, itl_s=0.001)  # noqa: E731
    async with ScriptedServer(behave).running() as server:
        target = reach(server)
        planner = await Planner.open(target, shared(6, 30), await probe(target), seed=1, base_dir=Path())
        server.asked.clear()
        got = await drive(target, planner.plan("r1", "a1"))
        assert server.proxied == 0 or target.base == "http://model.example.org"
    assert counts(got), got.discarded
    assert [r.phase for r in got.records] == ["cold"] * 6 + ["measured"] * 30
    if target.loopback:
        # Each measured request took the slot of one that had just ended.
        ends = [(r.sent_s, r.finished_s or 0.0) for r in got.records]
        assert all(sum(a <= r.sent_s < b for a, b in ends) == 6 for r in got.records[6:])
    assert server.max_in_flight == 6
    assert got.client.max_in_flight == 6
    assert all(r.ok for r in got.records)
    assert all(r.prompt_tokens == r.prompt_tokens_planned for r in got.records)
    assert all(r.output_tokens == r.output_tokens_planned == r.deltas for r in got.records)
    assert [r.prefix_first for r in got.records] == [True] + [False] * 35
    assert all(r.ttft_ms is not None and r.ttft_ms > 9.0 for r in got.records)
    assert got.started_s <= got.measured_from_s <= got.measured_to_s
    burst = [r.intended_s for r in got.records[:6]]
    assert len(set(burst)) == 1


async def test_the_same_key_again_is_discarded_and_three_keys_agree() -> None:
    """A server that remembers prompts: unseen 60 ms, seen 2 ms."""

    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        return stream(server, asked, ttft_s=0.06 if asked.cached_tokens < 48 else 0.002)

    async with ScriptedServer(behave).running() as server:
        target, planner = await planner_for(server, shared(4, 12))
        rounds = [await drive(target, planner.plan(f"r{i}", "a1")) for i in range(3)]
        again = await drive(target, planner.plan("r1", "a1"))
    assert all(counts(r) for r in rounds)
    for got in rounds:
        # One request of each burst computes the prompt, the others of it find its blocks.
        assert [r.cached_tokens for r in got.records].count(0) == 1
        assert next(r for r in got.records if r.cached_tokens == 0).phase == "cold"
        assert max(r.ttft_ms or 0 for r in got.records) > 59
    assert "tokens cached" in again.discarded


async def test_a_server_that_does_not_say_what_was_cached_is_not_accused() -> None:
    async with ScriptedServer(reports_cached=False).running() as server:
        target, planner = await planner_for(server, shared())
        await drive(target, planner.plan("r1", "a1"))
        got = await drive(target, planner.plan("r1", "a1"))
    assert counts(got), got.discarded
    assert all(r.cached_tokens is None for r in got.records)


async def test_slow_first_requests_end_in_the_warm_up() -> None:
    """The first requests after a start are slow; the warm-up takes them at full concurrency and length."""
    slow = iter([0.25] * 8)

    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        return stream(server, asked, ttft_s=next(slow, 0.005))

    async with ScriptedServer(in_rounds(behave)).running() as server:
        target, planner = await planner_for(server, shared(8, 20))
        warm = await drive(target, planner.warm_up("warm"))
        assert server.max_in_flight == 8
        assert next(slow, None) is None
        assert {r.phase for r in warm.records} == {"warmup"}
        assert {r.prompt_tokens for r in warm.records} == {60}
        got = await drive(target, planner.plan("r1", "a1"))
    assert counts(got), got.discarded


@pytest.mark.parametrize("role", [{"role": "assistant"}, {"role": "assistant", "content": ""}])
async def test_a_role_is_no_token_however_early_it_comes(role: dict[str, Any]) -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        rest = [
            chat_chunk({"content": "a"}),
            chat_chunk({"content": "b"}, "length"),
            usage_chunk(len(asked.tokens), 2),
            DONE,
        ]
        return Reply([chat_chunk(role), 0.08, *rest])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(3, 6, output_tokens=2), "chat")
    assert all(r.ok and (r.ttft_ms or 0) >= 79 and r.deltas == 2 for r in got.records)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_reasoning_is_generated_too_and_the_answer_is_timed_apart(key: str) -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        thoughts = [chat_chunk({key: "hm"}) for _ in range(10)]
        answer = [0.2, chat_chunk({"content": "42"}, "stop"), usage_chunk(len(asked.tokens), 11), DONE]
        return Reply([chat_chunk({"role": "assistant", "content": ""}), *thoughts, *answer])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(2, 4), "chat")
    for record in got.records:
        assert record.ok
        assert record.deltas == 11
        assert record.first_token_s is not None
        assert record.first_answer_s is not None
        assert record.first_answer_s > record.first_token_s


def _some(share: float, bad: Callable[[Asked], Reply]) -> Callable[[ScriptedServer, Asked], Reply]:
    numbers = iter(range(10**6))
    return lambda server, asked: bad(asked) if next(numbers) % 10 < share * 10 else stream(server, asked)


async def test_replies_without_a_token_are_failures_and_too_many_discard_the_round() -> None:
    async with ScriptedServer(in_rounds(_some(0.6, lambda a: Reply([DONE])))).running() as server:
        got = await one_round(server, shared(4, 36))
    failed = [r for r in got.records if not r.ok]
    assert len(failed) == 24
    assert {r.error_code for r in failed} == {"no_token"}
    assert all(r.ttft_ms is None and r.e2e_ms is None for r in failed)
    assert "24 of 40" in got.discarded


async def test_a_few_failures_are_recorded_and_the_round_counts() -> None:
    async with ScriptedServer(
        in_rounds(lambda s, a: Reply([DONE]) if a.number == 7 else stream(s, a))
    ).running() as server:
        got = await one_round(server, shared(4, 20))
    assert [r.error_code for r in got.records if not r.ok] == ["no_token"]
    assert counts(got), got.discarded


ERROR = b'data: {"error": {"message": "CUDA out of memory", "code": 500}}\n\n'
TWO = [text_chunk("a"), text_chunk("b")]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply([*TWO, ERROR, DONE]), "stream_error"),
        (Reply([*TWO, b"event: error\ndata: gone\n\n", DONE]), "stream_error"),
        (Reply([*TWO]), "cut"),
        (Reply([*TWO], framing="close"), "cut"),
        (Reply([*TWO, 0.01], cut=True), "cut"),
        (Reply([0.01], cut=True), "cut"),
        (Reply([b"<html>busy</html>"], 503, "text/html", "length"), "http_error"),
        (Reply([b'{"error": {"message": "who?"}}'], 401, "application/json", "length"), "auth"),
        (Reply([usage_chunk(9, 0), DONE]), "no_token"),
    ],
)
async def test_every_way_to_fail_is_a_failure(
    reply: Reply, code: str, reach: Callable[[ScriptedServer], Target]
) -> None:
    async with ScriptedServer(in_rounds(lambda s, a: reply if a.number == 9 else stream(s, a))).running() as server:
        target = reach(server)
        planner = await Planner.open(target, shared(4, 26), await probe(target), seed=1, base_dir=Path())
        server.asked.clear()
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 30)
    failed = [r for r in got.records if not r.ok]
    assert [r.error_code for r in failed] == [code]
    assert failed[0].ttft_ms is None
    assert failed[0].finished_s is not None
    assert counts(got), got.discarded
    assert len(got.records) == 30


def _shred(data: bytes) -> list[bytes]:
    places = sorted({0, len(data), *(random.Random(len(data)).randrange(len(data) + 1) for _ in range(6))})
    return [data[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bytes", lambda r: Reply(r.parts, split=lambda d: [bytes([b]) for b in d])),
        ("shreds", lambda r: Reply(r.parts, split=_shred)),
        ("one piece", lambda r: Reply([b"".join(p for p in r.parts if isinstance(p, bytes))])),
        ("crlf", lambda r: Reply([p.replace(b"\n", b"\r\n") if isinstance(p, bytes) else p for p in r.parts])),
        (
            "comments",
            lambda r: Reply([b": ping\n\n", *(b": ping\n" + p if isinstance(p, bytes) else p for p in r.parts)]),
        ),
        ("to the end", lambda r: Reply(r.parts, framing="close")),
        ("with a length", lambda r: Reply(r.parts, framing="length")),
        ("closing", lambda r: Reply(r.parts, keep_alive=False)),
        ("ids", lambda r: Reply([b"id: 4\nretry: 10\n" + p if isinstance(p, bytes) else p for p in r.parts])),
    ],
)
async def test_the_form_of_the_stream_does_not_matter(
    name: str, shape: Callable[[Reply], Reply], reach: Callable[[ScriptedServer], Target]
) -> None:
    async with ScriptedServer(in_rounds(lambda s, a: shape(stream(s, a)))).running() as server:
        target = reach(server)
        planner = await Planner.open(target, shared(3, 9), await probe(target), seed=1, base_dir=Path())
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 30)
    assert [r.error for r in got.records if r.error] == [], name
    assert all(r.deltas == r.output_tokens == r.output_tokens_planned for r in got.records)


async def test_several_tokens_in_a_delta_are_counted_by_usage() -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        return Reply([text_chunk("a b c"), 0.01, text_chunk("d e", "length"), usage_chunk(len(asked.tokens), 5), DONE])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(2, 4, output_tokens=5))
    for record in got.records:
        assert (record.deltas, record.output_tokens) == (2, 5)
        assert record.tpot_ms is not None
        assert record.tpot_ms == pytest.approx(record.token_gaps_ms[0] / 4)


async def test_one_token_has_no_time_per_token() -> None:
    async with ScriptedServer().running() as server:
        got = await one_round(server, shared(2, 6, output_tokens=1))
    assert all(r.ok and r.tpot_ms is None and r.token_gaps_ms == [] for r in got.records)


async def test_a_hundred_and_fifty_at_once() -> None:
    """No limit of 100 connections."""
    behave = lambda s, a: stream(s, a, ttft_s=1.0)  # noqa: E731
    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(150, 20, output_tokens=1))
        assert server.max_in_flight == 150
    assert got.client.max_in_flight == 150
    assert all(r.ok for r in got.records)


async def test_a_request_that_takes_too_long_is_a_timeout(reach: Callable[[ScriptedServer], Target]) -> None:
    slow = lambda s, a: stream(s, a, ttft_s=25.0 if a.number == 5 else 0.0)  # noqa: E731
    async with ScriptedServer(in_rounds(slow)).running() as server:
        patient = reach(server)
        planner = await Planner.open(patient, shared(2, 18), await probe(patient), seed=1, base_dir=Path())
        server.asked.clear()
        target = Target(patient.base_url, request_timeout_s=0.4)
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 20)
    assert [r.error_code for r in got.records if not r.ok] == ["timeout"]
    assert len(got.records) == 20


async def test_proxies_do_not_stand_between_us_and_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with ScriptedServer().running() as server:
        got = await one_round(server, shared())
    assert counts(got), got.discarded
    assert all(r.ok for r in got.records)


async def test_a_blocked_client_says_so() -> None:
    """Something in our own process holds the loop for 200 ms again and again."""

    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if asked.number % 12 == 8:
            time.sleep(0.2)
        return stream(server, asked, ttft_s=0.03, itl_s=0.002)

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(4, 40))
    assert got.client.limited
    assert "lagged" in got.discarded
    assert got.client.loop_lag_p99_ms is not None
    assert got.client.loop_lag_p99_ms > 100


async def test_an_open_loop_keeps_its_times_whatever_the_server_does() -> None:
    behave = lambda s, a: stream(s, a, ttft_s=0.3)  # noqa: E731
    async with ScriptedServer(in_rounds(behave)).running() as server:
        workload = shared(requests=30, concurrency=None, rate=100.0, output_tokens=1)
        target, planner = await planner_for(server, workload)
        plan = planner.plan("r1", "a1")
        got = await drive(target, plan)
        assert server.max_in_flight > 15
    due = [plan.lead.request(i).at_s or 0.0 for i in range(31)]
    assert [r.phase for r in got.records] == ["cold"] + ["measured"] * 30
    for record, at_s in zip(got.records, due, strict=True):
        assert record.intended_s == pytest.approx(got.started_s + at_s)
        assert record.ttft_ms is not None
        assert record.ttft_ms >= 299
    assert got.client.asked_in_flight is None


async def test_lateness_of_the_client_is_part_of_the_latency() -> None:
    """A request that was due while the loop was blocked waited, and says so."""

    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if asked.number == 10:
            time.sleep(0.25)
        return stream(server, asked)

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(requests=60, concurrency=None, rate=100.0, output_tokens=1))
    assert max(r.sent_s - r.intended_s for r in got.records) > 0.1
    assert max(r.ttft_ms or 0 for r in got.records) > 100
    assert got.client.limited


async def test_classes_beside_the_load_run_until_it_is_done() -> None:
    behave = lambda s, a: stream(s, a, ttft_s=0.01)  # noqa: E731
    workload = MixedWorkload(
        concurrency=3,
        requests=40,
        classes=[
            WorkloadClass(name="busy", user_prompt_tokens=30, output_tokens=(1, 3)),
            WorkloadClass(
                name="visitor", visit_every="50ms", system_prompt_tokens=64, user_prompt_tokens=4, output_tokens=1
            ),
            WorkloadClass(name="side", concurrency=2, user_prompt_tokens=8, output_tokens=2),
        ],
    )  # fmt: skip
    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, workload)
    assert counts(got), got.discarded
    groups = {name: [r for r in got.records if r.group == name] for name in ("busy", "visitor", "side")}
    assert [r.phase for r in groups["busy"]] == ["cold"] * 3 + ["measured"] * 40
    visits = groups["visitor"]
    assert len(visits) >= 3
    assert visits[0].phase == "cold"
    assert visits[0].prefix_first
    assert not visits[1].prefix_first
    assert visits[1].cached_tokens == 64
    gaps = [b.intended_s - a.intended_s for a, b in pairwise(visits)]
    assert all(0.005 < gap < 0.2 for gap in gaps)
    assert len(groups["side"]) > 10
    assert {r.phase for r in groups["side"]} == {"cold", "measured"}
    assert all(r.ok for r in got.records)
    assert [r.index for r in got.records] == list(range(len(got.records)))


@pytest.mark.parametrize("where", ["before the first token", "in mid-stream"])
async def test_a_server_that_stops_sending_is_noticed(where: str) -> None:
    async def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if asked.number < 8:
            return stream(server, asked)
        if where == "in mid-stream":
            return Reply([text_chunk("a"), 30.0, DONE])
        await asyncio.sleep(30)
        return Reply([])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        began = time.monotonic()
        got = await one_round(server, shared(4, 30), stall_timeout_s=0.4)
    assert time.monotonic() - began < 15
    assert "sent nothing" in got.discarded
    assert {r.error_code for r in got.records if not r.ok} == {"stalled"}


ENDLESS = {
    "one line": [b"x" * (1 << 12)],
    "an event that never ends": [b"data: " + b"x" * 15000 + b"\n"],
    "empty lines": [b"\n" * 4096],
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_a_reply_without_end_is_given_up_and_the_round_goes_on(
    reach: Callable[[ScriptedServer], Target], what: str
) -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        flood: list[bytes | float] = [*ENDLESS[what] * (8 << 20 >> 12), 30.0]
        return Reply(flood) if asked.number == 8 else stream(server, asked)

    async with ScriptedServer(in_rounds(behave)).running() as server:
        target = reach(server)
        planner = await Planner.open(target, shared(4, 30), await probe(target), seed=1, base_dir=Path())
        server.asked.clear()
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 25)
    failed = [r for r in got.records if not r.ok]
    assert [r.error_code for r in failed] == ["stream_error"]
    assert "longer than any answer" in (failed[0].error or "")
    assert counts(got), got.discarded


async def test_an_engine_that_dies_ends_the_round() -> None:
    async with ScriptedServer(in_rounds(lambda s, a: stream(s, a, ttft_s=10.0))).running() as server:
        began = time.monotonic()
        got = await one_round(server, shared(4, 30), died=lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 15
    assert "died" in got.discarded
    assert not any(r.ok for r in got.records)


async def test_too_many_failures_end_the_round_early() -> None:
    bad = Reply([b'{"error": {"message": "no KV left"}}'], 500, "application/json", "length")
    async with ScriptedServer(in_rounds(lambda s, a: bad)).running() as server:
        got = await one_round(server, shared(4, 996))
        assert len(server.asked) < 150
    assert "no KV left" in got.discarded


async def test_nobody_listens() -> None:
    async with ScriptedServer().running() as server:
        target, planner = await planner_for(server, shared(4, 40))
    got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 10)
    assert got.records[0].error_code == "refused"
    assert not any(r.ok for r in got.records)
    assert "refused" in got.discarded


async def test_connections_that_the_server_closed_meanwhile_are_no_failures() -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        reply = stream(server, asked, ttft_s=0.005)
        reply.silent_close = asked.number % 3 == 0
        return reply

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(4, 40))
        assert server.connections > 10
    assert [r.error for r in got.records if r.error] == []


async def test_cancelling_closes_every_connection() -> None:
    async with ScriptedServer(in_rounds(lambda s, a: stream(s, a, ttft_s=20.0))).running() as server:
        target, planner = await planner_for(server, shared(5, 30))
        task = asyncio.create_task(drive(target, planner.plan("r1", "a1")))
        while server.in_flight < 5:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await server.until_alone()


async def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    async with ScriptedServer(in_rounds(lambda s, a: stream(s, a, ttft_s=0.05))).running() as server:
        await one_round(server, shared(2, 12), on_progress=lambda done, of: told.append((done, of)))
    assert told
    assert all(of == 14 and 0 < done <= 14 for done, of in told)
    assert told == sorted(told)


def test_the_round_runs_on_either_loop() -> None:
    async def main() -> list[RequestRecord]:
        async with ScriptedServer(lambda s, a: stream(s, a, ttft_s=0.01)).running() as server:
            return (await one_round(server, shared(4, 20))).records

    assert all(r.ok for r in run(main()))
    assert all(r.ok for r in asyncio.run(main()))


@pytest.mark.parametrize("arrival", [{"concurrency": 2}, {"concurrency": None, "rate": 100.0}])
async def test_a_bug_in_a_plan_is_raised_and_does_not_hang(arrival: dict[str, Any]) -> None:
    def request(i: int) -> PlannedRequest:
        if i == 4:
            raise ZeroDivisionError
        return made.lead.request(i)

    async with ScriptedServer().running() as server:
        target, planner = await planner_for(server, shared(**{"requests": 10, **arrival}))
        made = planner.plan("r1", "a1")
        broken = replace(made, arrivals=(replace(made.lead, request=request),))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(drive(target, broken), 20)


@pytest.mark.parametrize("lost", [3, 20, 43])
@pytest.mark.parametrize("sent", ["nothing", "two tokens"])
async def test_one_request_that_never_returns_is_one_timeout(lost: int, sent: str) -> None:
    """Others are answered meanwhile: the engine moves."""

    async def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if asked.number != lost:
            return stream(server, asked)
        if sent == "nothing":
            await asyncio.sleep(30)
        return Reply([*TWO, 30.0, DONE])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(4, 40, output_tokens=(8, 12)), stall_timeout_s=0.4)
    failed = [r for r in got.records if not r.ok]
    assert [r.error_code for r in failed] == ["timeout"]
    assert counts(got), got.discarded
    assert len(got.records) == 44


async def test_one_at_a_time_a_second_silence_in_a_row_is_a_stall() -> None:
    async def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if asked.number >= 8:
            await asyncio.sleep(30)
        return stream(server, asked)

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(1, 30), stall_timeout_s=0.3)
    assert got.discard_code == "engine_stalled"
    assert [r.error_code for r in got.records if not r.ok] == ["timeout", "stalled"]


async def test_answers_that_the_engine_aborts_are_failures(reach: Callable[[ScriptedServer], Target]) -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        if asked.number % 2:
            return stream(server, asked)
        return Reply([text_chunk("a"), text_chunk("b", "abort"), usage_chunk(len(asked.tokens), 2, 0), DONE])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        target = reach(server)
        planner = await Planner.open(target, shared(4, 40), await probe(target), seed=1, base_dir=Path())
        server.asked.clear()
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 30)
    assert got.discard_code == "too_many_failures"
    assert "abnormal_end" in {r.error_code for r in got.records}
    assert "finish_reason 'abort'" in got.discarded


async def test_a_gateway_that_collects_the_stream_is_seen(reach: Callable[[ScriptedServer], Target]) -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        reply = stream(server, asked)
        return Reply([0.3, b"".join(p for p in reply.parts if isinstance(p, bytes))])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        target = reach(server)
        planner = await Planner.open(target, shared(4, 8), await probe(target), seed=1, base_dir=Path())
        got = await asyncio.wait_for(drive(target, planner.plan("r1", "a1")), 30)
    assert all(r.ok and r.collected for r in got.records)


async def test_an_honest_round_is_what_was_asked_for() -> None:
    behave = lambda s, a: stream(s, a, ttft_s=0.02, itl_s=0.005)  # noqa: E731
    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(4, 20))
    assert counts(got), got.discarded
    assert not any(r.collected for r in got.records)
    assert all(r.finish_reason == "length" and r.choices == 1 and not r.keep_alives for r in got.records)


@pytest.mark.parametrize("kind", ["answers", "prompts"])
async def test_a_round_that_is_not_what_was_asked_for_is_discarded(kind: str) -> None:
    def behave(server: ScriptedServer, asked: Asked) -> Reply:
        given = 2 if kind == "answers" else int(asked.body["max_tokens"])
        counted = len(asked.tokens) if kind == "answers" else len(asked.tokens) // 2
        return Reply([*[text_chunk("a")] * (given - 1), text_chunk("b", "stop"), usage_chunk(counted, given, 0), DONE])

    async with ScriptedServer(in_rounds(behave)).running() as server:
        got = await one_round(server, shared(4, 20, output_tokens=(6, 9)))
        assert got.discard_code == f"{kind}_differ"
        relaxed = shared(4, 20, output_tokens=(6, 9), ignore_eos=False)
        again = await one_round(server, relaxed)
        assert "ignore_eos" not in server.asked[-1].body
    assert counts(again) is (kind == "answers"), again.discarded
