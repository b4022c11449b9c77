"""Drive one round against a server and note what it did."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.observation import Phase, RequestRecord, RoundObservation
from tuner.load.discard import COUNTS, FAILURES_ALLOWED, GIVEN_UP, Discard
from tuner.load.exchange import Exchange
from tuner.load.keeping_up import loop_lags_ms
from tuner.load.observe import observe
from tuner.load.plan import Arrivals, PlannedRequest, RoundPlan, longest_reply_bytes
from tuner.load.proxied import carrier_for
from tuner.load.target import Target

TICK_S = 0.005
_LOOK_EVERY = 20
"""Ticks between looks at deadlines, progress and the engine."""
_KEEP_BYTES = 256 << 20
"""Replies kept unread; beyond this they are read as they end, which costs the round some time."""
_MOST_BYTES = 1 << 30
"""Of all replies under way together: what no measurement needs and no memory should hold."""


async def drive(
    target: Target,
    plan: RoundPlan,
    clock: Clock = SYSTEM_CLOCK,
    *,
    stall_timeout_s: float = 60.0,
    died: Callable[[], bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RoundObservation:
    """One round. Never raises for a failing server: `discarded` then says why the round cannot count.

    `died` is polled (ten times a second): true ends the round. So does a server that sends nothing at all for
    `stall_timeout_s` while requests wait, and a share of failures that no later success could make up for. A request
    that is never answered while others are is a timeout, no more.
    `on_progress(ended, of)` is called now and then. Cancellation closes every connection and goes on.
    """
    round_ = _Round(target, plan, clock, stall_timeout_s, died, on_progress)
    return await round_.run()


class _Source:
    """Where one of the plan's arrival processes stands."""

    __slots__ = ("index", "next", "plan", "ready", "sent_measured", "timer")

    def __init__(self, index: int, plan: Arrivals) -> None:
        self.index = index
        self.plan = plan
        self.next = 0
        self.ready: PlannedRequest | None = None
        self.timer: asyncio.TimerHandle | None = None

    def take(self) -> PlannedRequest | None:
        """The next request; None when there is none left."""
        if self.plan.count is not None and self.next >= self.plan.count:
            return None
        request = self.ready if self.ready is not None else self.plan.request(self.next)
        self.ready = None
        self.next += 1
        return request

    def prepare(self) -> None:
        """Make the next request before it is needed."""
        if self.ready is None and (self.plan.count is None or self.next < self.plan.count):
            self.ready = self.plan.request(self.next)


class _Round:
    def __init__(
        self,
        target: Target,
        plan: RoundPlan,
        clock: Clock,
        stall_timeout_s: float,
        died: Callable[[], bool] | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._target = target
        self._plan = plan
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._died = died
        self._on_progress = on_progress
        self._carrier = carrier_for(target, plan.path, self._ended, clock)
        self._sources = [_Source(i, a) for i, a in enumerate(plan.arrivals)]
        self._exchanges: list[Exchange] = []
        self._in_flight: dict[int, Exchange] = {}
        self._seen_prefixes: set[int] = set()
        self._max_in_flight = 0
        self._lead_ended = 0
        self._ended_count = 0
        self._failed_count = 0
        self._kept_bytes = 0
        self._measuring = False
        self._sending = True
        self._stopped: Discard = COUNTS
        self._answered_since = False
        """A request was answered since the last ones were given up for silence."""
        self._last_answered = -1
        self._ticks_late: list[float] = []
        self._tick_due = 0.0
        self._tick_handle: asyncio.TimerHandle | None = None
        self._last_progress_s = 0.0
        self._progress_mark = (-1, -1)
        self._total = sum(a.count or 0 for a in plan.arrivals)

    async def run(self) -> RoundObservation:
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        for source in self._sources:
            source.prepare()
        # A collection in mid-round stops everything for as long as the heap is large; reading the replies
        # afterwards makes many small objects and no garbage.
        gc_was_on = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            await self._drive(loop)
            return await self._observe()
        finally:
            gc.unfreeze()
            if gc_was_on:
                gc.enable()

    async def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await self._carrier.open(self._plan.expected_lanes)
            self._started_s = self._last_progress_s = self._clock.monotonic_s()
            self._tick_due = self._started_s + TICK_S
            self._tick_handle = loop.call_later(TICK_S, self._tick)
            self._begin()
            await self._over
        finally:
            self._sending = False
            if self._tick_handle is not None:
                self._tick_handle.cancel()
            for source in self._sources:
                if source.timer is not None:
                    source.timer.cancel()
            await self._carrier.close()

    def _begin(self) -> None:
        """Everything that is due at the start, together."""
        for source in self._sources:
            concurrency = source.plan.concurrency
            if concurrency is None:
                self._schedule(source)
                continue
            for _ in range(concurrency):
                request = source.take()
                if request is None:
                    break
                self._send(source, request, self._started_s)
        if not self._in_flight and all(s.timer is None for s in self._sources):
            self._finish()

    def _schedule(self, source: _Source) -> None:
        """Open loop: wait for the next request's time."""
        source.timer = None
        if not self._sending:
            return
        source.prepare()
        if source.ready is None:
            return
        due = self._started_s + (source.ready.at_s or 0.0)
        wait = due - self._clock.monotonic_s()
        source.timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._due, source, due)

    def _due(self, source: _Source, due: float) -> None:
        source.timer = None
        try:
            request = source.take()
            if request is not None and self._sending:
                # An event loop's timer may come a little early; the request then does not wait, and its clock runs.
                self._send(source, request, min(due, self._clock.monotonic_s()))
                self._schedule(source)
        except Exception as error:
            self._break(error)

    def _phase(self, source: _Source, position: int, prefix_first: bool) -> Phase:
        if self._plan.phase == "warmup":
            return "warmup"
        plan = source.plan
        if position < plan.cold or (plan.firsts_are_cold and prefix_first):
            return "cold"
        if source.index == 0:
            self._measuring = True
            return "measured"
        return "measured" if self._measuring else "cold"

    def _send(self, source: _Source, request: PlannedRequest, intended_s: float) -> None:
        prefix = request.prefix
        first = prefix is not None and prefix not in self._seen_prefixes
        if first:
            assert prefix is not None
            self._seen_prefixes.add(prefix)
        index = len(self._exchanges)
        phase = self._phase(source, source.next - 1, first)
        exchange = Exchange(request, index, phase, intended_s, source.index, first)
        self._exchanges.append(exchange)
        in_flight = self._in_flight
        in_flight[index] = exchange
        if len(in_flight) > self._max_in_flight:
            self._max_in_flight = len(in_flight)
        self._carrier.send(exchange)

    def _ended(self, exchange: Exchange) -> None:
        """An exchange is over: the closed loop's slot is free."""
        try:
            self._account(exchange)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """A bug of ours in a callback: an event loop would log it and the round would wait for ever."""
        self._sending = False
        if not self._over.done():
            self._over.set_exception(error)

    def _account(self, exchange: Exchange) -> None:
        if self._in_flight.pop(exchange.index, None) is None:
            return
        self._ended_count += 1
        source = self._sources[exchange.source]
        if source.index == 0:
            self._lead_ended += 1
        if exchange.failure is not None or self._looks_failed(exchange):
            self._failed_count += 1
            if self._failed_count > FAILURES_ALLOWED * self._total and self._stopped == COUNTS:
                self._stop("", "too many requests failed")
                return
        else:
            self._answered_since = True
            self._last_answered = max(self._last_answered, exchange.index)
        if self._sending:
            if self._lead_ended == self._plan.lead.count:
                self._sending = False
            elif source.plan.concurrency is not None:
                request = source.take()
                if request is not None:
                    self._send(source, request, exchange.end_s or self._clock.monotonic_s())
                    if source.plan.count is None:
                        asyncio.get_running_loop().call_soon(source.prepare)
        if not self._sending and not self._in_flight:
            self._finish()
        self._kept_bytes += sum(map(len, exchange.pieces)) if exchange.pieces else 0
        if self._kept_bytes > _KEEP_BYTES:
            self._read(exchange)

    def _looks_failed(self, exchange: Exchange) -> bool:
        framer = exchange.framer
        status = framer.status if framer is not None else exchange.status
        return status != 200

    def _tick(self) -> None:
        now = self._clock.monotonic_s()
        self._ticks_late.append(now - self._tick_due)
        if len(self._ticks_late) % _LOOK_EVERY == 0:
            self._look(now)
        if self._over.done():
            return
        now = self._clock.monotonic_s()
        self._tick_due = now + TICK_S
        self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _look(self, now: float) -> None:
        """Deadlines, progress, the engine."""
        if self._died is not None and self._died():
            self._stop("engine_died", "the engine died in mid-round", "cut", "the engine died")
            return
        limit = self._target.request_timeout_s
        overdue = [e for e in self._in_flight.values() if now - e.sent_s > limit]
        for exchange in overdue:
            self._carrier.give_up(exchange, "timeout", f"no end within {limit:g} s")
        self._weigh()
        received = sum(len(e.times) for e in self._in_flight.values())
        mark = (self._ended_count, received)
        if mark != self._progress_mark or not self._in_flight:
            self._last_progress_s = now
            if self._on_progress is not None and mark[0] != self._progress_mark[0]:
                self._on_progress(self._ended_count, max(self._total, self._ended_count))
            self._progress_mark = mark
        elif now - self._last_progress_s > self._stall_timeout_s:
            self._silent(f"the server sent nothing for {self._stall_timeout_s:g} s")

    def _silent(self, text: str) -> None:
        """Nothing came for long. Requests that others have overtaken, or a single one, are lost; else it is a stall."""
        waiting = list(self._in_flight.values())
        lost = len(waiting) == 1 or all(e.index < self._last_answered for e in waiting)
        if not lost or not self._answered_since:
            self._stop("engine_stalled", f"{text} while {len(waiting)} requests waited", "stalled", text)
            return
        self._answered_since = False
        for exchange in waiting:
            if exchange.index in self._in_flight:
                self._carrier.give_up(exchange, "timeout", f"no answer, and {text}")

    def _weigh(self) -> None:
        """Give up replies that are longer than any answer could be."""
        total = 0
        for exchange in list(self._in_flight.values()):
            held = exchange.weigh()
            total += held
            most = longest_reply_bytes(exchange.request.output_tokens)
            if held > most or total > _MOST_BYTES:
                total -= held
                exchange.drop()
                self._carrier.give_up(
                    exchange, "stream_error", f"the reply is longer than any answer of its length: {held >> 20} MiB"
                )

    def _stop(self, code: str, reason: str, failure: str = "cut", text: str = GIVEN_UP) -> None:
        """The round cannot count any more, for this code and reason: end what is under way as failures."""
        if self._stopped == COUNTS:
            self._stopped = (code, reason)
        self._sending = False
        for exchange in list(self._in_flight.values()):
            self._carrier.give_up(exchange, failure, text)
        self._finish()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _read(self, exchange: Exchange) -> RequestRecord:
        return exchange.read(
            reports_cached_tokens=self._plan.reports_cached_tokens,
            reports_finish=self._plan.reports_finish,
            secret=self._target.api_key or None,
        )

    async def _observe(self) -> RoundObservation:
        records: list[RequestRecord] = []
        for number, exchange in enumerate(self._exchanges):
            records.append(self._read(exchange))
            if number % 64 == 63:
                await asyncio.sleep(0)
        return observe(
            self._plan,
            self._exchanges,
            records,
            loop_lags_ms(self._ticks_late, TICK_S),
            started_s=self._started_s,
            max_in_flight=self._max_in_flight,
            stopped=self._stopped,
        )
