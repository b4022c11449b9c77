"""Reading `/metrics` over HTTP, once or around a span of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.observation import CounterDelta
from tuner.telemetry.families import Snapshot, Unknown, delta, kv_usage_of_text, parse, requests_left
from tuner.web import is_loopback, read_reply

_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_AGAIN_AFTER_S = 0.2


def metrics_url(base_url: str) -> str:
    """Where a server with this base URL (with or without /v1) has its metrics."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/") + "/metrics"


def _session(base_url: str, headers: Mapping[str, str] | None) -> aiohttp.ClientSession:
    straight = is_loopback(urlsplit(base_url).hostname or "")
    return aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers, trust_env=not straight)


async def _text(session: aiohttp.ClientSession, base_url: str) -> str | Unknown:
    try:
        async with session.get(metrics_url(base_url), allow_redirects=False) as response:
            if response.status != 200:
                return Unknown(f"/metrics answered {response.status}")
            return (await read_reply(response)).decode("utf-8", errors="replace")
    except TimeoutError:
        return Unknown(f"/metrics did not answer within {_TIMEOUT.total:g} s")
    except (aiohttp.ClientError, OSError) as error:
        return Unknown(f"/metrics cannot be read: {error or type(error).__name__}")


async def _snapshot(session: aiohttp.ClientSession, base_url: str) -> Snapshot | Unknown:
    text = await _text(session, base_url)
    return text if isinstance(text, Unknown) else parse(text)


async def scrape(base_url: str, *, headers: Mapping[str, str] | None = None) -> Snapshot | Unknown:
    """One look at `/metrics`; anything but a readable 200 is Unknown, with the reason."""
    async with _session(base_url, headers) as session:
        return await _snapshot(session, base_url)


class MetricsSpan:
    """What `metrics_span` gives; `delta` is filled when the span ends."""

    def __init__(self) -> None:
        self.before: Snapshot | Unknown = Unknown("the span has not begun")
        self.after: Snapshot | Unknown = Unknown("the span has not ended")
        self.usages: list[float | None] = []
        self.delta = CounterDelta()


@asynccontextmanager
async def metrics_span(
    base_url: str,
    clock: Clock = SYSTEM_CLOCK,
    poll_s: float = 0.25,
    *,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[MetricsSpan]:
    """Counters from entry to exit, and the peak of the KV usage polled in between.

    The looks at both ends are tried twice; when one stays unreadable the counters are null, with the
    reason. A poll that fails is left out. A body that fails leaves `delta` empty.
    """
    span = MetricsSpan()
    async with _session(base_url, headers) as session:
        span.before = await _end(session, base_url, clock)
        poller = asyncio.create_task(_poll(session, base_url, clock, poll_s, span.usages))
        try:
            yield span
        finally:
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
        span.after = await _end(session, base_url, clock)
        span.delta = delta(span.before, span.after, span.usages)


async def _end(session: aiohttp.ClientSession, base_url: str, clock: Clock) -> Snapshot | Unknown:
    found = await _snapshot(session, base_url)
    # Unreadable, or a request that has just ended and is still shown as running: looked at once more.
    if isinstance(found, Unknown) or requests_left(found):
        await clock.sleep(_AGAIN_AFTER_S)
        found = await _snapshot(session, base_url)
    return found


async def _poll(
    session: aiohttp.ClientSession, base_url: str, clock: Clock, poll_s: float, usages: list[float | None]
) -> None:
    while True:
        await clock.sleep(poll_s)
        text = await _text(session, base_url)
        if not isinstance(text, Unknown):
            usages.append(kv_usage_of_text(text))
