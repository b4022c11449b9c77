"""From raw bytes and times to a record: the same whichever way the bytes were cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scripted_server import DONE, event, text_chunk, usage_chunk
from tuner.domain.observation import RequestRecord
from tuner.load.exchange import Exchange
from tuner.load.plan import PlannedRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def record(pieces: list[bytes], failure: tuple[str, str] | None = None, secret: str | None = None) -> RequestRecord:
    exchange = Exchange(PlannedRequest(b"", 7, 3), 0, "measured", 0.0, 0, False)
    exchange.pieces = pieces
    exchange.times = [float(i + 1) for i in range(len(pieces))]
    exchange.end_s = float(len(pieces))
    exchange.failure = failure
    return exchange.read(secret=secret)


def test_each_token_has_the_time_of_its_piece() -> None:
    parts = [HEAD, *(chunk(text_chunk(t)) for t in "abc"), chunk(usage_chunk(7, 3, 0) + DONE), b"0\r\n\r\n"]
    got = record(parts)
    assert got.ok
    assert got.first_token_s == 2.0
    assert got.last_token_s == 4.0
    assert got.token_gaps_ms == [1000.0, 1000.0]
    assert (got.prompt_tokens, got.output_tokens, got.cached_tokens, got.deltas) == (7, 3, 0, 3)
    assert got.tpot_ms == 1000.0


def test_several_tokens_in_one_piece_have_one_time() -> None:
    got = record(
        [HEAD + chunk(text_chunk("a")) + chunk(text_chunk("b")), chunk(usage_chunk(7, 2) + DONE), b"0\r\n\r\n"]
    )
    assert got.token_gaps_ms == [0.0]


def test_one_token_has_no_time_per_token() -> None:
    got = record([HEAD + chunk(text_chunk("a", "length")), chunk(usage_chunk(7, 1) + DONE) + b"0\r\n\r\n"])
    assert got.ok
    assert got.tpot_ms is None
    assert got.token_gaps_ms == []


@given(st.lists(st.text(max_size=5), min_size=1, max_size=8), st.lists(st.integers(0, 900), max_size=12))
def test_any_cut_counts_the_same_tokens(texts: list[str], cuts: list[int]) -> None:
    data = HEAD + b"".join(chunk(text_chunk(t)) for t in texts)
    data += chunk(usage_chunk(7, len(texts)) + DONE) + b"0\r\n\r\n"
    places = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    got = record([data[a:b] for a, b in pairwise(places) if a < b])
    assert got.ok
    assert got.deltas == len(texts)
    assert got.output_tokens == len(texts)
    assert got.first_token_s is not None


@given(st.text(max_size=20))
def test_the_quick_path_reads_what_the_slow_one_reads(text: str) -> None:
    event = (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]}, ensure_ascii=False).encode()
        + b"\n\n"
    )
    first = chunk(text_chunk("a"))
    whole = record([HEAD, first, chunk(event), chunk(DONE), b"0\r\n\r\n"])
    halves = chunk(event)
    cut = record([HEAD, first, halves[:9], halves[9:], chunk(DONE), b"0\r\n\r\n"])
    assert whole.deltas == cut.deltas == 2
    assert whole.error == cut.error


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (DONE, "no_token"),
        (text_chunk("a") + text_chunk("b"), "cut"),
        (b"", "cut"),
        (text_chunk("a") + b'data: {"error": {"message": "oom"}}\n\n' + DONE, "stream_error"),
        (usage_chunk(7, 0) + DONE, "no_token"),
        (b'{"choices": [{"text": "all at once"}]}', "cut"),
        (b'data: {"choices": [{"text": "x"', "no_token"),
    ],
)
def test_failures(body: bytes, code: str) -> None:
    got = record([HEAD, chunk(body) if body else b"", b"0\r\n\r\n"])
    assert got.error_code == code
    assert not got.ok
    assert got.ttft_ms is None


def test_a_finish_reason_is_an_end_without_done() -> None:
    assert record([HEAD, chunk(text_chunk("a", "stop")), b"0\r\n\r\n"]).ok


def test_done_without_its_blank_line_is_an_end() -> None:
    assert record([HEAD, chunk(text_chunk("a")), chunk(b"data: [DONE]"), b"0\r\n\r\n"]).ok


def test_a_connection_that_broke_after_done_is_a_failure_all_the_same() -> None:
    got = record([HEAD, chunk(text_chunk("a"))], failure=("cut", "the server closed the connection, in mid-stream"))
    assert got.error_code == "cut"


@pytest.mark.parametrize(("status", "code"), [(401, "auth"), (403, "auth"), (404, "http_error"), (500, "http_error")])
def test_other_statuses(status: int, code: str) -> None:
    body = b'{"error": {"message": "no such thing for key sk-12345"}}'
    got = record([b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)), body], secret="sk-12345")
    assert got.error_code == code
    assert got.status == status
    assert "no such thing" in (got.error or "")
    assert "sk-12345" not in (got.error or "")


def test_bytes_that_are_no_http() -> None:
    assert record([b"SSH-2.0-OpenSSH_9\r\n\r\n"]).error_code == "stream_error"


def test_usage_without_details_means_none_cached_where_the_server_reports_them() -> None:
    exchange = Exchange(PlannedRequest(b"", 7, 1), 0, "cold", 0.0, 0, True)
    exchange.pieces = [HEAD, chunk(text_chunk("a") + usage_chunk(7, 1) + DONE), b"0\r\n\r\n"]
    exchange.times = [1.0, 2.0, 3.0]
    assert exchange.read(reports_cached_tokens=True).cached_tokens == 0


def test_a_finish_reason_that_other_answers_have_is_missed() -> None:
    exchange = Exchange(PlannedRequest(b"", 7, 1), 0, "measured", 0.0, 0, False)
    exchange.pieces = [HEAD, chunk(text_chunk("a") + usage_chunk(7, 1) + DONE), b"0\r\n\r\n"]
    exchange.times = [1.0, 2.0, 3.0]
    got = exchange.read(reports_finish=True)
    assert got.error_code == "cut"
    assert "without the finish reason that other answers have" in (got.error or "")


@pytest.mark.parametrize("reason", ["abort", "error", "content_filter"])
def test_an_abnormal_end_is_a_failure_whatever_follows(reason: str) -> None:
    got = record([HEAD, chunk(text_chunk("a") + text_chunk("", reason) + usage_chunk(7, 1) + DONE), b"0\r\n\r\n"])
    assert got.error_code == "abnormal_end"
    assert got.finish_reason == reason
    assert repr(reason) in (got.error or "")
    assert not got.ok


def test_one_choice_without_an_end_is_a_cut() -> None:
    both = event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}, {"index": 1, "text": "a"}]})
    got = record([HEAD, chunk(both + DONE), b"0\r\n\r\n"])
    assert got.error_code == "cut"
    assert got.choices == 2


def test_a_reason_that_could_steer_a_terminal_is_shown_without_that() -> None:
    got = record([HEAD, chunk(text_chunk("a", "\x1b[31m" + "x" * 500) + DONE), b"0\r\n\r\n"])
    assert got.error_code == "abnormal_end"
    assert "\x1b" not in (got.error or "")
    assert len(got.error or "") < 200


@pytest.mark.parametrize("beat", [b"data:\n\n", b"data: \n\n", b"data\n\n", b": ping\n\n", b"event: ping\ndata: x\n\n"])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_heartbeats_are_no_events(beat: bytes, ends: bytes) -> None:
    stream = beat + text_chunk("a") + beat + beat + text_chunk("b", "length") + usage_chunk(7, 2) + beat + DONE
    got = record([HEAD, chunk(b"\xef\xbb\xbf" + stream.replace(b"\n", ends)), b"0\r\n\r\n"])
    assert got.error is None
    assert got.deltas == got.output_tokens == 2


def test_one_delta_of_many_tokens_has_no_time_per_token() -> None:
    got = record([HEAD, chunk(text_chunk("a b c", "length")), chunk(usage_chunk(7, 3) + DONE), b"0\r\n\r\n"])
    assert got.ok
    assert got.tpot_ms is None
