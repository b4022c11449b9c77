"""Connections that carry requests and keep raw bytes with their arrival time.

Why not `aiohttp.ClientSession` for the hot path: at 256 streams with a token every 5 ms a client on one
core has 20 microseconds a token. aiohttp parses the response, wraps every chunk and wakes a task for it;
`benchmarks/ruler.py` shows what that costs beside this. Here a token costs one callback that notes the time
and keeps the bytes; parsing waits until the round is over. Everything else (probe, tokenizer, proxies) goes
through aiohttp.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

from tuner.clock import Clock, SystemClock
from tuner.load.exchange import Exchange
from tuner.load.framing import Framer, FramingError
from tuner.load.target import Target, split_address

CONNECT_TIMEOUT_S = 10.0
_MAYBE_LAST = b"\r\n\r\n"

OnEnd = Callable[[Exchange], None]


class Carrier(Protocol):
    """What `drive` needs of connections. Ends of exchanges are told through the `on_end` it was made with."""

    async def open(self, count: int) -> None:
        """Have `count` connections ready; failures show when a request needs one."""
        ...

    def send(self, exchange: Exchange) -> None:
        """Send it now, or as soon as a connection is there; never raises for a failing server."""
        ...

    def give_up(self, exchange: Exchange, code: str, text: str) -> None:
        """End it as a failure and drop what carries it."""
        ...

    async def close(self) -> None:
        """Drop everything; nothing is told any more."""
        ...


class Lane(asyncio.Protocol):
    """One connection, one request at a time."""

    __slots__ = ("_exchange", "_framer", "_keep", "_lanes", "_note", "_now", "_quick", "_transport", "waited")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._now = lanes.now
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._framer = Framer()
        self._note: Callable[[float], None]
        self._keep: Callable[[bytes], None]
        self._quick = False
        """The response is chunked, and its head is read."""
        self.waited = False
        """It was open and idle before its request: the server may have closed it meanwhile."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def start(self, exchange: Exchange) -> None:
        transport = self._transport
        assert transport is not None
        self._exchange = exchange
        framer = exchange.framer
        assert framer is not None
        self._framer = framer
        self._quick = False
        self._note = exchange.times.append
        self._keep = exchange.pieces.append
        exchange.slot = self
        exchange.sent_s = self._now()
        body = exchange.request.body
        transport.writelines((b"%b%d\r\n\r\n" % (self._lanes.head, len(body)), body))

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.drop()
            return
        self._note(self._now())
        self._keep(data)
        # A chunked response ends in an empty line behind the last chunk's own line end, so a piece of four
        # bytes or more that ends otherwise cannot be the last one.
        if self._quick and len(data) > 3 and not data.endswith(_MAYBE_LAST):
            return
        try:
            self._settle(exchange)
        except FramingError as error:
            self._end(exchange, ("stream_error", f"the response breaks HTTP: {error}"))

    def _settle(self, exchange: Exchange) -> None:
        framer = self._framer
        pieces = exchange.pieces
        fed = exchange.fed
        framer.skip(pieces[fed] if fed == len(pieces) - 1 else b"".join(pieces[fed:]))
        exchange.fed = len(pieces)
        self._quick = framer.chunked
        if framer.done:
            self._end(exchange, None)

    def _end(self, exchange: Exchange, failure: tuple[str, str] | None) -> None:
        exchange.end_s = exchange.times[-1] if exchange.times else self._now()
        exchange.failure = failure
        exchange.slot = None
        self._exchange = None
        lanes = self._lanes
        if failure is None and self._framer.keep_alive and not self._framer.rest:
            self.waited = True
            lanes.idle.append(self)
        else:
            self.drop()
        lanes.on_end(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lanes.forget(self)
        exchange = self._exchange
        if exchange is None:
            return
        self._exchange = None
        exchange.slot = None
        if self._framer.ends_with_connection and exc is None:
            self._end(exchange, None)
        elif self.waited and not exchange.pieces and not exchange.resent:
            # The server closed an idle connection just as we used it: no answer was begun.
            exchange.resent = True
            self._lanes.send_fresh(exchange)
        else:
            what = f"the connection was lost: {exc}" if exc else "the server closed the connection"
            pieces = len(exchange.pieces)
            self._end(exchange, ("cut", f"{what}, {'before any answer' if not pieces else 'in mid-stream'}"))

    def drop(self) -> None:
        """Close at once; an exchange under way is forgotten, its owner knows."""
        self._exchange = None
        self._lanes.forget(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()


class Lanes:
    """A pool of connections straight to the target (no proxy), as many as are needed."""

    def __init__(self, target: Target, path: str, on_end: OnEnd, clock: Clock) -> None:
        address = split_address(target.base)
        self._address = address
        self._ssl = ssl.create_default_context() if address.tls else None
        lines = [f"POST {address.path}{path} HTTP/1.1", f"Host: {address.authority}"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        self.head = ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")
        self.on_end = on_end
        # The system's clock without the detour, since every token asks it.
        self.now = time.monotonic if isinstance(clock, SystemClock) else clock.monotonic_s
        self.idle: list[Lane] = []
        self._all: set[Lane] = set()
        self._opening: dict[asyncio.Task[None], Exchange] = {}

    async def open(self, count: int) -> None:
        allow_open_files(count)
        width = 64
        # Waves, since a listen queue is often no longer than 128.
        for start in range(0, count, width):
            wave = [self._connect() for _ in range(min(width, count - start))]
            lanes = await asyncio.gather(*wave, return_exceptions=True)
            for lane in lanes:
                if isinstance(lane, Lane):
                    lane.waited = True
                    self.idle.append(lane)
            if not self.idle:
                return

    async def _connect(self) -> Lane:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, lane = await loop.create_connection(
                lambda: Lane(self), self._address.host, self._address.port, ssl=self._ssl
            )
        self._all.add(lane)
        return lane

    def send(self, exchange: Exchange) -> None:
        while self.idle:
            lane = self.idle.pop()
            if lane.usable:
                lane.start(exchange)
                return
        self.send_fresh(exchange)

    def send_fresh(self, exchange: Exchange) -> None:
        """Open a connection for it."""
        task = asyncio.get_running_loop().create_task(self._connect_and_send(exchange))
        exchange.slot = task
        self._opening[task] = exchange
        task.add_done_callback(lambda done: self._opening.pop(done, None))

    async def _connect_and_send(self, exchange: Exchange) -> None:
        try:
            lane = await self._connect()
        except TimeoutError:
            self._refuse(exchange, "timeout", f"no connection within {CONNECT_TIMEOUT_S:g} s")
        except OSError as error:
            self._refuse(exchange, "refused", f"no connection: {error.strerror or error}")
        else:
            if lane.usable:
                lane.start(exchange)
            else:
                self._refuse(exchange, "cut", "the server closed the connection, before any answer")

    def _refuse(self, exchange: Exchange, code: str, text: str) -> None:
        exchange.end_s = self.now()
        exchange.failure = (code, text)
        exchange.slot = None
        self.on_end(exchange)

    def give_up(self, exchange: Exchange, code: str, text: str) -> None:
        slot = exchange.slot
        if isinstance(slot, Lane):
            slot.drop()
        elif isinstance(slot, asyncio.Task):
            self._opening.pop(slot, None)
            slot.cancel()
        self._refuse(exchange, code, text)

    def forget(self, lane: Lane) -> None:
        self._all.discard(lane)

    async def close(self) -> None:
        tasks = list(self._opening)
        for task in tasks:
            task.cancel()
        for lane in list(self._all):
            lane.drop()
        self.idle.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)


def allow_open_files(count: int) -> None:
    """Lift this process's soft limit of open files to what `count` connections need, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
