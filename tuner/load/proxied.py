"""Requests through aiohttp: for servers that only a proxy of the environment reaches."""

from __future__ import annotations

import asyncio
import urllib.request

import aiohttp

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.load.exchange import Exchange
from tuner.load.lanes import CONNECT_TIMEOUT_S, Carrier, Lanes, OnEnd, allow_open_files
from tuner.load.target import Target, split_address


def session_for(target: Target, timeout_s: float | None = None) -> aiohttp.ClientSession:
    """A session with no connection limit, explicit timeouts, and no proxy for this machine itself."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=timeout,
        trust_env=not target.loopback,
        headers=target.headers,
    )


def carrier_for(target: Target, path: str, on_end: OnEnd, clock: Clock = SYSTEM_CLOCK) -> Carrier:
    """Straight connections, unless the environment names a proxy for this target."""
    made = ProxiedLanes if needs_proxy(target) else Lanes
    return made(target, path, on_end, clock)


def needs_proxy(target: Target) -> bool:
    """True when `http_proxy`, `https_proxy` and `no_proxy` together send this target through a proxy."""
    if target.loopback:
        return False
    address = split_address(target.base)
    proxies = urllib.request.getproxies_environment()
    scheme = "https" if address.tls else "http"
    return scheme in proxies and not urllib.request.proxy_bypass(f"{address.host}:{address.port}")


class ProxiedLanes:
    """A `Carrier` on `aiohttp.ClientSession`; a task for each request."""

    def __init__(self, target: Target, path: str, on_end: OnEnd, clock: Clock) -> None:
        self._target = target
        self._url = target.base + path
        self._on_end = on_end
        self._now = clock.monotonic_s
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> None:
        allow_open_files(count)
        self._session = session_for(self._target)

    def send(self, exchange: Exchange) -> None:
        exchange.framer = None
        task = asyncio.get_running_loop().create_task(self._carry(exchange))
        exchange.slot = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, exchange: Exchange) -> None:
        assert self._session is not None
        failure: tuple[str, str] | None = None
        try:
            exchange.sent_s = self._now()
            async with self._session.post(self._url, data=exchange.request.body) as response:
                exchange.status = response.status
                async for piece in response.content.iter_any():
                    exchange.times.append(self._now())
                    exchange.pieces.append(piece)
        except aiohttp.ClientConnectorError as error:
            failure = ("refused", f"no connection: {error.strerror or error}")
        except TimeoutError:
            failure = ("timeout", f"no connection within {CONNECT_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError) as error:
            failure = ("cut", f"the connection was lost: {error}")
        self._end(exchange, failure)

    def _end(self, exchange: Exchange, failure: tuple[str, str] | None) -> None:
        exchange.end_s = exchange.times[-1] if exchange.times else self._now()
        exchange.failure = failure
        exchange.slot = None
        self._on_end(exchange)

    def give_up(self, exchange: Exchange, code: str, text: str) -> None:
        if isinstance(exchange.slot, asyncio.Task):
            exchange.slot.cancel()
        exchange.end_s = self._now()
        exchange.failure = (code, text)
        exchange.slot = None
        self._on_end(exchange)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
