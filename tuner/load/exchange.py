"""One request on its way, and what became of it once the round is over."""

from __future__ import annotations

from tuner.domain.observation import Phase, RequestRecord
from tuner.domain.units import counted, printable
from tuner.load.framing import Framer, FramingError
from tuner.load.plan import PlannedRequest
from tuner.load.reply import NORMAL_ENDS, Reply, body_text
from tuner.load.sse import SseParser

_PLAIN_HEAD = b"data: {"
_PLAIN_TAIL = b"}\n\n\r\n"


class Exchange:
    """A request and the bytes that answered it, each piece with its arrival time; read after the round."""

    __slots__ = (
        "end_s",
        "failure",
        "fed",
        "framer",
        "index",
        "intended_s",
        "phase",
        "pieces",
        "prefix_first",
        "record",
        "request",
        "resent",
        "sent_s",
        "slot",
        "source",
        "status",
        "times",
        "weighed",
    )

    def __init__(
        self, request: PlannedRequest, index: int, phase: Phase, intended_s: float, source: int, prefix_first: bool
    ) -> None:
        self.request = request
        self.index = index
        self.phase: Phase = phase
        self.intended_s = intended_s
        self.source = source
        """Which of the plan's arrivals sent it."""
        self.prefix_first = prefix_first
        self.sent_s = intended_s
        self.times: list[float] = []
        self.pieces: list[bytes] = []
        self.fed = 0
        """Pieces that the framer has seen."""
        self.weighed = (0, 0)
        """Pieces that `weigh` has seen, and their bytes."""
        self.framer: Framer | None = Framer()
        """None: the pieces are body already, `status` is known."""
        self.status: int | None = None
        self.end_s: float | None = None
        self.failure: tuple[str, str] | None = None
        """Code and sentence of what broke on the way; None when the response ended by itself."""
        self.resent = False
        self.slot: object | None = None
        """What carries it now."""
        self.record: RequestRecord | None = None

    def weigh(self) -> int:
        """Bytes of the reply so far; each piece is looked at once."""
        count, held = self.weighed
        fresh = len(self.pieces) - count
        if fresh > 0:
            held += sum(map(len, self.pieces[count:]))
            self.weighed = (count + fresh, held)
        return held

    def drop(self) -> None:
        """Forget what came."""
        self.pieces.clear()
        self.times.clear()

    def read(
        self, *, reports_cached_tokens: bool = False, reports_finish: bool = False, secret: str | None = None
    ) -> RequestRecord:
        """The record; `secret` is blotted out of what the server said. Drops the bytes.

        Of a server that reports cached tokens, `usage` without them means none; of one that reports finish reasons,
        an answer without one was cut.
        """
        if self.record is None:
            self.record = _read(self, reports_cached_tokens, reports_finish, secret)
            self.pieces = []
            self.times = []
        return self.record


def _read(exchange: Exchange, reports_cached_tokens: bool, reports_finish: bool, secret: str | None) -> RequestRecord:
    record = RequestRecord(
        index=exchange.index,
        phase=exchange.phase,
        intended_s=exchange.intended_s,
        sent_s=exchange.sent_s,
        prompt_tokens_planned=exchange.request.prompt_tokens,
        output_tokens_planned=exchange.request.output_tokens,
        group=exchange.request.group,
        prefix_first=exchange.prefix_first,
    )
    raw = exchange.framer is not None
    framer = Framer()
    parser = SseParser()
    reply = Reply()
    other: list[bytes] = []
    failure = exchange.failure
    try:
        _take(exchange, framer, parser, reply, other)
    except FramingError as error:
        failure = failure or ("stream_error", f"the response breaks HTTP: {error}")
    reply.close()
    if parser.pending == b"[DONE]":
        # Some servers leave out the blank line behind the last event.
        reply.done = True
    record.status = framer.status if raw else exchange.status
    record.prompt_tokens = reply.prompt_tokens
    record.output_tokens = reply.output_tokens
    record.cached_tokens = reply.cached_tokens
    if reply.cached_tokens is None and reports_cached_tokens and reply.prompt_tokens is not None:
        record.cached_tokens = 0
    times = reply.token_times
    if times:
        record.first_token_s = times[0]
        record.last_token_s = times[-1]
        record.token_gaps_ms = reply.gaps_ms
    record.first_answer_s = reply.first_answer_s
    record.deltas = len(times)
    record.keep_alives = reply.keep_alives
    record.choices = max(1, len(reply.choices))
    record.finish_reason = None if reply.finish_reason is None else printable(reply.finish_reason[:40])
    record.finished_s = exchange.end_s
    code_and_text = failure_of(record, reply, failure, b"".join(other), parser.pending, reports_finish=reports_finish)
    if code_and_text is not None:
        record.error_code, record.error = code_and_text
        if secret:
            record.error = record.error.replace(secret, "***")
    return record


def _take(exchange: Exchange, framer: Framer, parser: SseParser, reply: Reply, other: list[bytes]) -> None:
    """Read every piece: the tokens into `reply`, the body of an error reply into `other`."""
    raw = exchange.framer is not None
    take_json = reply.take_json
    pieces = exchange.pieces
    between = False
    if exchange.framer is not None and pieces and exchange.framer.chunked and exchange.framer.status == 200:
        # The head was read when it came; the body may begin in the same piece.
        head = framer.resume_behind(exchange.framer)
        if len(pieces[0]) >= head:
            pieces = [pieces[0][head:], *pieces[1:]]
            between = True
        else:
            framer.reset()
    for at_s, piece in zip(exchange.times, pieces, strict=True):
        # Nearly every piece is exactly one chunk with one event on one line: told apart here, since this loop is
        # most of what a token costs. Whatever looks otherwise takes the long way.
        if between and piece.endswith(_PLAIN_TAIL):
            end = piece.find(b"\r\n")
            start = end + 2
            last = len(piece)
            if (
                piece.startswith(_PLAIN_HEAD, start)
                and piece.find(b"\n", start) == last - 4
                and piece.find(b"\r", start) == last - 2
                and _hex(piece[:end]) == last - start - 2
            ):
                take_json(piece[start + 6 : -4], at_s)
                parser.begun = True
                continue
        body = framer.feed(piece) if raw else piece
        if body:
            if (framer.status if raw else exchange.status) == 200:
                for event in parser.feed(body):
                    reply.take(event, at_s)
            else:
                other.append(body)
        between = raw and framer.between_chunks and parser.between_events


def _hex(digits: bytes) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return -1


def failure_of(
    record: RequestRecord,
    reply: Reply,
    failure: tuple[str, str] | None,
    other: bytes,
    pending: bytes,
    *,
    reports_finish: bool = False,
) -> tuple[str, str] | None:
    """Why a reply is no success: code and sentence; None when it is one."""
    status, reason, tokens = record.status, record.finish_reason, counted(record.deltas, "token")
    if status is not None and status != 200:
        text = body_text(other)
        if status in (401, 403):
            return "auth", f"HTTP {status}: {text}"
        return "http_error", f"HTTP {status}: {text}"
    if reply.error is not None:
        return "stream_error", reply.error
    if reason is not None and reason.lower() not in NORMAL_ENDS:
        return "abnormal_end", f"the server ended the answer after {tokens}, with finish_reason {reason!r}"
    if failure is not None:
        return failure
    if not (reply.finished or reply.done):
        if not record.deltas and pending:
            return "no_token", f"the reply is no stream of events: {body_text(pending)}"
        return "cut", f"the stream ended after {tokens}, without a finish reason or [DONE]"
    if not record.deltas:
        return "no_token", "the stream ended without a single token"
    if not reply.finished and (reports_finish or reason is not None):
        return "cut", f"the stream ended after {tokens}, without the finish reason that other answers have"
    return None
