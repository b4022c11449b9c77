"""Where an HTTP/1.1 response ends, and which of its bytes are body. Pure; right for any split of the bytes."""

from __future__ import annotations

import re
from typing import Literal

_MAX_HEAD = 1 << 16
_BLANK_LINE = re.compile(rb"\n\r?\n")
_STATUS = re.compile(rb"[1-5]\d\d")
_LENGTH = re.compile(rb"\d{1,18}")
_State = Literal["head", "length", "chunk_size", "chunk", "chunk_end", "trailer", "until_close", "done"]


class FramingError(ValueError):
    """The bytes are no HTTP/1.x response."""


class Framer:
    """Takes the bytes of one response piece by piece and gives back its body's bytes.

    `done` turns true with the last byte; what stands behind it stays in `rest`. FramingError for bytes
    that are no response.
    """

    __slots__ = ("_buffer", "_need", "_state", "chunked", "head_length", "keep_alive", "status")

    def __init__(self) -> None:
        self._buffer = b""
        self._need = 0
        self._state: _State = "head"
        self.status: int | None = None
        self.chunked = False
        self.keep_alive = True
        self.head_length = 0
        """Bytes of the head, interim responses included."""

    @property
    def done(self) -> bool:
        return self._state == "done"

    @property
    def ends_with_connection(self) -> bool:
        """True for a body without a length: the end of the connection is its end."""
        return self._state == "until_close"

    @property
    def rest(self) -> bytes:
        """Bytes behind the end of the response."""
        return self._buffer if self.done else b""

    def resume_behind(self, other: Framer) -> int:
        """Take over what another framer read of this response's head; returns the head's length in bytes."""
        self.status, self.chunked, self.keep_alive = other.status, other.chunked, other.keep_alive
        self._state = "chunk_size"
        return other.head_length

    def reset(self) -> None:
        """As if nothing had been read."""
        self.status, self.chunked, self.keep_alive, self._state = None, False, True, "head"

    @property
    def between_chunks(self) -> bool:
        """True where a new chunk begins and nothing is held back."""
        return self._state == "chunk_size" and not self._buffer

    def skip(self, data: bytes) -> None:
        """`feed` for who only wants to know where the response ends; quick over whole chunks."""
        if self._state == "chunk_size" and not self._buffer:
            position = 0
            size = len(data)
            while True:
                end = data.find(b"\r\n", position)
                if end < 0:
                    break
                need = _chunk_size(data[position:end])
                after = end + 2 + need
                if not need or after + 2 > size or data[after : after + 2] != b"\r\n":
                    break
                position = after + 2
            data = data[position:]
        self.feed(data)

    def feed(self, data: bytes) -> bytes:
        """The body's bytes among `data` (and what was held back of earlier pieces)."""
        buffer = self._buffer + data if self._buffer else data
        position = 0
        body: list[bytes] = []
        while True:
            state = self._state
            if state == "chunk" or state == "length":
                take = min(self._need, len(buffer) - position)
                if take:
                    body.append(buffer[position : position + take])
                    position += take
                    self._need -= take
                if self._need:
                    break
                self._state = "chunk_end" if state == "chunk" else "done"
            elif state == "chunk_size":
                end = buffer.find(b"\n", position)
                if end < 0:
                    self._limit(len(buffer) - position)
                    break
                self._need = _chunk_size(buffer[position:end])
                position = end + 1
                self._state = "chunk" if self._need else "trailer"
            elif state == "chunk_end":
                end = buffer.find(b"\n", position)
                if end < 0:
                    self._limit(len(buffer) - position)
                    break
                if buffer[position:end].strip():
                    raise FramingError("a chunk is longer than it said")
                position = end + 1
                self._state = "chunk_size"
            elif state == "trailer":
                end = buffer.find(b"\n", position)
                if end < 0:
                    self._limit(len(buffer) - position)
                    break
                if not buffer[position:end].strip():
                    self._state = "done"
                position = end + 1
            elif state == "head":
                end = _head_end(buffer, position)
                if end < 0:
                    self._limit(len(buffer) - position)
                    break
                self._read_head(buffer[position:end])
                self.head_length += end - position
                position = end
            elif state == "until_close":
                body.append(buffer[position:])
                position = len(buffer)
                break
            else:
                break
        self._buffer = buffer[position:]
        return b"".join(body)

    @staticmethod
    def _limit(held: int) -> None:
        if held > _MAX_HEAD:
            raise FramingError("a header or chunk line has no end")

    def _read_head(self, head: bytes) -> None:
        first, _, lines = head.partition(b"\n")
        parts = first.split(None, 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not _STATUS.fullmatch(parts[1]):
            raise FramingError(f"no HTTP/1.x response: {first[:60]!r}")
        status = int(parts[1])
        if 100 <= status < 200:
            return
        self.status = status
        headers: dict[bytes, bytes] = {}
        for line in lines.split(b"\n"):
            name, colon, value = line.partition(b":")
            if colon:
                headers[name.strip().lower()] = value.strip()
        connection = headers.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in connection and (parts[0] != b"HTTP/1.0" or b"keep-alive" in connection)
        length = headers.get(b"content-length")
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self.chunked = True
            self._state = "chunk_size"
        elif status in (204, 304):
            self._state = "done"
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise FramingError(f"Content-Length is {length[:40]!r}")
            self._need = int(length)
            self._state = "length"
        else:
            self._state = "until_close"
            self.keep_alive = False


def _head_end(buffer: bytes, start: int) -> int:
    """Index behind the blank line that ends the headers; -1 when it is not there yet."""
    found = _BLANK_LINE.search(buffer, start)
    return found.end() if found else -1


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    try:
        size = int(digits, 16)
    except ValueError:
        raise FramingError(f"chunk size {line[:40]!r}") from None
    if size < 0 or digits[:1] in (b"+", b"-") or b"_" in digits:
        raise FramingError(f"chunk size {line[:40]!r}")
    return size
