"""Server-sent events do not depend on how their bytes are split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tuner.load.sse import Event, SseParser

# Pieces that stress line ends, comments, fields with and without a space, empty data, long and binary text.
_LINES = st.sampled_from(
    [b"data: a", b"data:b", b"data:  two spaces", b"data", b": comment", b"event: error", b"id: 7", b"retry: 9", b"x"]
) | st.binary(max_size=12).map(lambda raw: b"data: " + raw.replace(b"\r", b"").replace(b"\n", b""))
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    out = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    for _ in range(draw(st.integers(0, 6))):
        end = draw(_ENDS)
        for line in draw(st.lists(_LINES, max_size=4)):
            out += line + end
        out += end
    return out + draw(st.sampled_from([b"", b"data: cut", b"data: cut\n"]))


def parse(pieces: list[bytes]) -> list[Event]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(streams(), st.lists(st.integers(0, 200), max_size=12))
def test_any_split_gives_the_same_events(data: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(places)]
    assert parse(pieces) == parse([data])
    assert parse([bytes([b]) for b in data]) == parse([data])


def test_a_line_of_many_pieces_is_one_event() -> None:
    """Thousands of pieces without a line end: each is looked at once, or this takes minutes."""
    parser = SseParser()
    assert not any(parser.feed(b"data: " if not n else b"x" * 4096) for n in range(8001))
    assert not parser.between_events
    assert parser.feed(b"\n\n") == [Event(b"x" * 4096 * 8000)]
    assert parser.between_events


def reference(data: bytes) -> list[Event]:
    """The standard's algorithm, line by line over the whole text."""
    data = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events: list[Event] = []
    collected: list[bytes] = []
    name = b""
    for line in data.split(b"\n")[:-1]:
        if not line:
            if collected:
                events.append(Event(b"\n".join(collected), name))
            collected, name = [], b""
        elif not line.startswith(b":"):
            key, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if key == b"data":
                collected.append(value)
            elif key == b"event":
                name = value
    return events


@given(streams())
def test_follows_the_standard(data: bytes) -> None:
    assert parse([data]) == reference(data)


def test_several_data_lines_are_one_event() -> None:
    assert parse([b"data: {\ndata: }\n\n"]) == [Event(b"{\n}")]


def test_comments_alone_are_no_event() -> None:
    assert parse([b": ping\n\n: ping\n\ndata: x\n\n"]) == [Event(b"x")]


def test_an_event_that_the_end_cuts_off_is_not_dispatched_but_can_be_seen() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n\ndata: [DONE]") == [Event(b"a")]
    assert parser.pending == b"[DONE]"
    assert not parser.between_events


def test_a_name_does_not_leak_into_the_next_event() -> None:
    assert parse([b"event: error\n\ndata: x\n\n"]) == [Event(b"x", b"")]
    assert parse([b"event: error\ndata: x\n\ndata: y\n\n"]) == [Event(b"x", b"error"), Event(b"y")]
