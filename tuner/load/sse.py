"""Server-sent events from bytes. Pure; right for any split of the bytes.

Follows the WHATWG HTML standard, 'Server-sent events': lines end in LF, CRLF or CR; a line that begins with
a colon is a comment; several `data` lines of one event are joined with LF; a blank line dispatches; an event
that the end of the stream cuts off is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event."""

    data: bytes
    name: bytes = b""
    """The `event` field; '' for most."""


class SseParser:
    """Feed it bytes as they come; it gives back the events that they complete."""

    __slots__ = ("_after_cr", "_data", "_held", "_name", "begun")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """Pieces of a line that has no end yet; joined once it has: a long line costs no more than its bytes."""
        self._data: list[bytes] = []
        self._name = b""
        self._after_cr = False
        self.begun = False
        """The very beginning, where a byte order mark may stand, is past."""

    def feed(self, data: bytes) -> list[Event]:
        """Events completed by `data`, in order."""
        if not data:
            return []
        if self._after_cr:
            # A CR ended the last line of the piece before; an LF that follows belongs to it.
            self._after_cr = False
            if data[0] == 0x0A:
                data = data[1:]
        if not self.begun:
            data = b"".join([*self._held, data])
            self._held = []
            if data[:3] == b"\xef\xbb\xbf":
                data = data[3:]
            elif b"\xef\xbb\xbf".startswith(data):
                self._held = [data] if data else []
                return []
            self.begun = True
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = data.split(b"\n")
        if len(lines) > 1 and self._held:
            lines[0] = b"".join([*self._held, lines[0]])
            self._held = []
        last = lines.pop()
        if last:
            self._held.append(last)
        events: list[Event] = []
        for line in lines:
            if line:
                self._field(line)
            elif self._data:
                events.append(Event(b"\n".join(self._data), self._name))
                self._data = []
                self._name = b""
            else:
                self._name = b""
        return events

    def _field(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            return
        name, colon, value = line.partition(b":")
        if colon and value[:1] == b" ":
            value = value[1:]
        if name == b"event":
            self._name = value
        elif name == b"data":
            self._data.append(value)

    @property
    def between_events(self) -> bool:
        """True where a new event begins and nothing is held back."""
        return not (self._held or self._data or self._name or self._after_cr)

    @property
    def pending(self) -> bytes:
        """Data of an event that was begun and not dispatched; at the end of the stream: it was cut off."""
        lines = [*self._data]
        held = b"".join(self._held)
        if held.startswith(b"data:"):
            lines.append(held[5:].removeprefix(b" "))
        return b"\n".join(lines)
