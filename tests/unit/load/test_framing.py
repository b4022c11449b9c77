"""Where a response ends does not depend on how its bytes are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.load.framing import Framer, FramingError

BODIES = st.lists(
    st.binary(min_size=1, max_size=40) | st.sampled_from([b"0\r\n\r\n", b"\r\n", b"0\r\n", b"a\r\n0"]), max_size=6
)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bytes, str]:
    pieces = draw(BODIES)
    body = b"".join(pieces)
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\nLink: a\r\n\r\n"]))
    kind = draw(st.sampled_from(["chunked", "length"]))
    if kind == "length":
        return interim + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body), body, kind
    head = interim + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    extension = draw(st.sampled_from([b"", b";a=b"]))
    trailer = draw(st.sampled_from([b"", b"X-Trailer: 1\r\n"]))
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces)
    return head + chunks + b"0\r\n" + trailer + b"\r\n", body, kind


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


@given(responses(), st.lists(st.integers(0, 300), max_size=10))
def test_the_body_and_its_end_are_the_same_for_any_split(response: tuple[bytes, bytes, str], cuts: list[int]) -> None:
    data, body, _ = response
    for pieces in (pieces_of(data, cuts), [bytes([b]) for b in data]):
        framer = Framer()
        got = b""
        for number, piece in enumerate(pieces):
            if framer.done:
                assert not b"".join(pieces[number:])
                break
            got += framer.feed(piece)
        assert got == body
        assert framer.done
        assert framer.status == 200
        assert framer.keep_alive


@given(responses(), st.lists(st.integers(0, 300), max_size=10))
def test_skipping_finds_the_same_end(response: tuple[bytes, bytes, str], cuts: list[int]) -> None:
    data, _, _ = response
    framer = Framer()
    pieces = pieces_of(data, cuts)
    fed = 0
    for piece in pieces:
        if framer.done:
            break
        framer.skip(piece)
        fed += len(piece)
    assert framer.done
    assert not framer.rest
    assert fed == len(data)


@given(responses(), st.lists(st.integers(0, 300), max_size=10))
def test_a_piece_that_cannot_be_the_last_never_is(response: tuple[bytes, bytes, str], cuts: list[int]) -> None:
    """The client's quick look: behind the head of a chunked response, the end shows in the last four bytes."""
    data, _, kind = response
    framer = Framer()
    for piece in pieces_of(data, cuts):
        quick = framer.chunked
        framer.skip(piece)
        if kind == "chunked" and quick and len(piece) > 3 and not piece.endswith(b"\r\n\r\n"):
            assert not framer.done


def test_bytes_behind_the_end_are_kept_apart() -> None:
    framer = Framer()
    assert framer.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1") == b"ab"
    assert framer.done
    assert framer.rest == b"HTTP/1.1"


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
    ],
)
def test_whether_the_connection_stays(head: bytes, keep: bool) -> None:
    framer = Framer()
    framer.feed(head)
    assert framer.done
    assert framer.keep_alive is keep


def test_without_a_length_the_connection_is_the_end() -> None:
    framer = Framer()
    assert framer.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") + framer.feed(b"def") == b"abcdef"
    assert framer.ends_with_connection
    assert not framer.done


def test_thousands_of_interim_responses_are_passed_over() -> None:
    framer = Framer()
    framer.feed(b"HTTP/1.1 103 X\r\n\r\n" * 100_000)
    assert framer.status is None
    assert framer.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab") == b"ab"
    assert framer.done


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"HTTP/1.1 %b OK\r\n\r\n" % (b"2" * 5000),
        b"HTTP/1.1 99 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % (b"9" * 5000),
        b"x" * 70000,
    ],
)
def test_what_is_no_response_is_an_error(data: bytes) -> None:
    with pytest.raises(FramingError):
        Framer().feed(data)
