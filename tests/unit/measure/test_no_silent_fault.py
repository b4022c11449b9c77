"""Faults put at random into an honest server's replies: a round that counts never shows their numbers unnamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.replies import Answer, Fault, Server, counted, honest, measured, token, usage_chunk
from tests.fakes.scripted_server import DONE, event
from tuner.domain.measurement import Measurement, metric
from tuner.domain.observation import CounterDelta, RoundObservation

METRICS = (
    "ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "cold_ttft_ms.p50", "itl_ms.p50", "itl_ms.p99", "tpot_ms.p50",
    "tpot_ms.p99", "e2e_ms.p50", "e2e_ms.p90", "request_throughput", "output_token_throughput", "prefix_hit_rate",
    "engine_steps", "preemptions", "kv_cache_usage_peak", "goodput_share",
)  # fmt: skip
LIMITS = ("ttft_ms.p99 <= 500", "itl_ms.p99 <= 60")
TOLERANCE = 0.03
NOT_ABOUT_FAULTS = ("rests on fewer than", "ran in waves")
"""Remarks that an honest round may have too."""


def some(every: int, fault: Fault) -> Fault:
    """One answer of so many has the fault."""
    return lambda answer: fault(answer) if answer.number % every == every - 1 else answer


def ends_after(tokens: int, finish: str) -> Fault:
    def fault(answer: Answer) -> Answer:
        most = min(tokens, answer.planned.output_tokens or 1)
        return honest(answer.number, answer.planned, tokens=most, finish=finish, cached=160 if answer.number else 0)

    return fault


def breaks_after(tokens: int, how: str) -> Fault:
    def fault(answer: Answer) -> Answer:
        if (answer.planned.output_tokens or 0) <= tokens:
            return answer
        events = answer.events[:tokens]
        if how == "cut":
            return replace(answer, events=events, failure=("cut", "the server closed the connection"))
        said = {"error event": event({"error": {"message": "engine died"}}), "no end": b""}[how]
        return replace(answer, events=[*events, (answer.ends_s, said + DONE)])

    return fault


def refused(status: int) -> Fault:
    return lambda answer: Answer(answer.number, answer.planned, [(0.001, b'{"error": "busy"}')], status)


def prompt_of(tokens: int) -> Fault:
    return lambda answer: honest(answer.number, answer.planned, prompt=tokens, cached=min(160, tokens))


def never_returns(answer: Answer) -> Answer:
    return replace(answer, events=answer.events[:1], failure=("timeout", "no end within 300 s"))


def held_until_the_end(answer: Answer) -> Answer:
    return replace(answer, events=[(answer.ends_s, data) for _, data in answer.events])


def flushed(every_s: float) -> Fault:
    return lambda answer: replace(answer, events=[(-(-t // every_s) * every_s, data) for t, data in answer.events])


def one_delta(answer: Answer) -> Answer:
    end_s, tokens = answer.ends_s, answer.planned.output_tokens or 1
    last = usage_chunk(200, tokens, 160 if answer.number else 0) + DONE
    return replace(answer, events=[(end_s, token("all", "length")), (end_s, last)])


def keep_alives(count: int) -> Fault:
    return lambda answer: replace(
        answer, events=[*((0.08 * i / (count + 1), token("")) for i in range(count)), *answer.events]
    )


def heartbeats(data: bytes) -> Fault:
    def fault(answer: Answer) -> Answer:
        return replace(answer, events=[pair for t, told in answer.events for pair in ((t - 1e-4, data), (t, told))])

    return fault


def split_in_two(answer: Answer) -> Answer:
    """Two answers at a time, each token of both in one step, where one was asked for."""
    tokens = answer.planned.output_tokens or 1
    events = [
        (0.08 + 0.02 * i, token(finish="length" if i == tokens - 1 else None, index=k))
        for i in range(tokens)
        for k in (0, 1)
    ]
    return replace(answer, events=[*events, (answer.ends_s, usage_chunk(200, 2 * tokens, 160) + DONE)])


EVERY = st.integers(1, 30)
ANSWERED = st.one_of(
    st.builds(
        some, EVERY, st.builds(ends_after, st.integers(1, 12), st.sampled_from(["stop", "length", "abort", "error"]))
    ),
    st.builds(
        some, EVERY, st.builds(breaks_after, st.integers(1, 20), st.sampled_from(["cut", "error event", "no end"]))
    ),
    st.builds(some, EVERY, st.builds(refused, st.sampled_from([400, 429, 500, 503]))),
    st.builds(some, EVERY, st.builds(prompt_of, st.integers(1, 400))),
    st.builds(some, st.integers(15, 40), st.just(never_returns)),
)
STREAMED = st.one_of(
    st.builds(some, EVERY, st.sampled_from([held_until_the_end, one_delta, split_in_two])),
    st.builds(some, EVERY, st.builds(flushed, st.floats(0.1, 2.0))),
    st.builds(some, EVERY, st.builds(keep_alives, st.integers(1, 9))),
    st.builds(
        some, EVERY, st.builds(heartbeats, st.sampled_from([b"data:\n\n", b": ping\n\n", b"event: ping\ndata: x\n\n"]))
    ),
)
Counted = Callable[[CounterDelta, RoundObservation], CounterDelta]


def others(extra: int, rate: float, left: int) -> Counted:
    """So many more requests finished than ours, or were left."""

    def count(ours: CounterDelta, observation: RoundObservation) -> CounterDelta:
        finished = (ours.requests_finished or 0) + extra
        return replace(
            ours, requests_finished=finished, requests_left=float(left), prefix_hit_rate=rate, engine_steps=9000.0,
            preemptions=7.0, kv_cache_usage_peak=0.99,
        )  # fmt: skip

    return count


def replicas(share: float) -> Counted:
    """The metrics are those of one of several servers."""

    def count(ours: CounterDelta, observation: RoundObservation) -> CounterDelta:
        finished = float(int(share * (ours.requests_finished or 0)))
        return replace(ours, requests_finished=finished, prefix_hit_rate=0.1, engine_steps=40.0)

    return count


COUNTERS = st.one_of(
    st.builds(others, st.integers(1, 1000), st.floats(0, 1), st.just(0)),
    st.builds(others, st.just(0), st.floats(0, 1), st.integers(1, 50)),
    st.builds(replicas, st.floats(0, 0.95)),
)


def server(outputs: list[int], concurrency: int) -> Server:
    return Server(requests=40, concurrency=concurrency, outputs=outputs)


SERVERS = st.builds(server, st.lists(st.integers(4, 24), min_size=1, max_size=7), st.integers(1, 6))


def differs(found: float | None, truth: float | None) -> bool:
    if found is None or truth is None:
        return False
    return abs(found - truth) > TOLERANCE * max(abs(truth), 1e-9)


def unnamed(found: Measurement, truth: Measurement) -> list[str]:
    """Metrics that show another number than the honest round, without a word that the honest round lacks."""
    off = [path for path in METRICS if differs(metric(found, path), metric(truth, path))]
    said = {w for w in found.warnings if not any(about in w for about in NOT_ABOUT_FAULTS)}
    return [] if said else [path for path in off if path.partition(".")[0] not in found.derived]


def never_silent(honest_server: Server, fault: Fault, count: Counted | None = None) -> None:
    truth = measured(honest_server.round(), limits=LIMITS)
    got = replace(honest_server, fault=fault).round()
    counters = counted(got) if count is None else count(counted(got), got)
    found = measured(got, counters, LIMITS)
    if got.discarded:
        assert got.discard_code
        return
    assert unnamed(found, truth) == []
    for path in METRICS:
        if metric(found, path) is None and metric(truth, path) is not None:
            assert found.unmeasured[path.partition(".")[0]]


@settings(max_examples=60, deadline=None)
@given(SERVERS, ANSWERED)
def test_answers_and_prompts_that_were_not_asked_for(honest_server: Server, fault: Fault) -> None:
    never_silent(honest_server, fault)


@settings(max_examples=60, deadline=None)
@given(SERVERS, STREAMED)
def test_streams_that_prove_less_than_they_seem_to(honest_server: Server, fault: Fault) -> None:
    never_silent(honest_server, fault)


@settings(max_examples=30, deadline=None)
@given(SERVERS, COUNTERS)
def test_counters_of_others(honest_server: Server, count: Counted) -> None:
    never_silent(honest_server, lambda answer: answer, count)


@settings(max_examples=40, deadline=None)
@given(SERVERS, ANSWERED, STREAMED, st.none() | COUNTERS)
def test_several_faults_at_once(honest_server: Server, one: Fault, other: Fault, count: Counted | None) -> None:
    never_silent(honest_server, lambda answer: other(one(answer)), count)


@settings(max_examples=15, deadline=None)
@given(st.floats(2.0, 8.0), st.integers(60, 200), st.floats(0.01, 0.2))
def test_an_open_loop_above_capacity(above: float, requests: int, service_s: float) -> None:
    """Each request waits for those before it, and more of them come than are served."""
    rate = above / service_s

    def fault(answer: Answer) -> Answer:
        waits_s = max(0.0, answer.number * (service_s - 1 / rate))
        return replace(answer, events=[(t + waits_s, data) for t, data in answer.events])

    honest_server = Server(requests=requests, rate=rate)
    assert honest_server.round().discarded == ""
    got = replace(honest_server, fault=fault).round()
    assert got.discard_code == "queue_grows"


@settings(max_examples=20, deadline=None)
@given(SERVERS)
def test_the_honest_server_is_left_alone(honest_server: Server) -> None:
    got = honest_server.round()
    assert got.discarded == ""
    found = measured(got, limits=LIMITS)
    assert not set(found.unmeasured) & {"itl_ms", "tpot_ms", "ttft_ms", "prefix_hit_rate", "engine_steps", "goodput"}
    assert found.derived == {}
    assert found.answered_share == 1.0
    assert all(any(about in w for about in NOT_ABOUT_FAULTS) for w in found.warnings)
