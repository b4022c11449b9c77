"""`/metrics` over a real connection: counters around a span, polls inside it, replies that are no help."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from tuner.clock import FakeClock
from tuner.telemetry import Snapshot, Unknown, metrics_span, scrape

PAGE = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
"""


class Server:
    """Answers /metrics with what `reply` makes of the number of the request, from 1."""

    def __init__(self) -> None:
        self.url = ""
        self.asked = 0
        self.headers: list[dict[str, str]] = []
        self.reply: Callable[[int], web.Response] = lambda n: web.Response(text=page(n))

    async def handle(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.headers.append(dict(request.headers))
        return self.reply(self.asked)


def page(n: int, usage: float = 0.1) -> str:
    return PAGE.format(queries=1000 * n, hits=900 + 100 * (n - 1), usage=usage)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/metrics", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


async def test_the_span_has_the_counters_of_its_ends(server: Server) -> None:
    async with metrics_span(server.url, poll_s=1000) as span:
        pass
    assert span.delta.prefix_hit_rate == pytest.approx(0.1)
    assert server.asked == 2


async def test_the_kv_peak_is_polled_inside(server: Server) -> None:
    server.reply = lambda n: web.Response(text=page(n, usage=0.8 if n == 3 else 0.1))
    async with metrics_span(server.url, FakeClock(), poll_s=0.25) as span:
        async with asyncio.timeout(10):
            while len(span.usages) < 4:
                await asyncio.sleep(0.005)
    assert span.delta.kv_cache_usage_peak == 0.8


async def test_a_single_500_at_an_end_is_tried_again(server: Server) -> None:
    server.reply = lambda n: web.Response(status=500) if n == 1 else web.Response(text=page(n))
    async with metrics_span(server.url, FakeClock(), poll_s=1e9) as span:
        await asyncio.sleep(0)
    assert span.delta.prefix_hit_rate is not None


async def test_requests_that_have_just_ended_are_looked_at_once_more(server: Server) -> None:
    running = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {}\n"
    server.reply = lambda n: web.Response(text=page(n) + running.format(1 if n == 2 else 0))
    async with metrics_span(server.url, FakeClock(), poll_s=1e9) as span:
        pass
    assert server.asked == 3
    assert span.delta.requests_left == 0
    server.reply = lambda n: web.Response(text=page(n) + running.format(4))
    async with metrics_span(server.url, FakeClock(), poll_s=1e9) as span:
        pass
    assert span.delta.requests_left == 4


@pytest.mark.parametrize("status", [401, 404, 500, 503])
async def test_a_server_without_metrics_is_unknown_and_nothing_fails(server: Server, status: int) -> None:
    server.reply = lambda n: web.Response(status=status, text="no")
    async with metrics_span(server.url, poll_s=0.01) as span:
        await asyncio.sleep(0.05)
    assert span.delta.prefix_hit_rate is None
    assert span.delta.reasons["prefix_hit_rate"] == f"/metrics answered {status}"
    assert span.delta.reasons["kv_cache_usage_peak"] == f"/metrics answered {status}"


async def test_bytes_that_are_no_text_are_unknown(server: Server) -> None:
    server.reply = lambda n: web.Response(body=b'vllm:x{engine="\xff\xfe 3\n')
    assert isinstance(await scrape(server.url), Unknown)


async def test_nobody_there_is_unknown() -> None:
    found = await scrape("http://127.0.0.1:9")
    assert isinstance(found, Unknown)
    assert "cannot be read" in found.reason


async def test_proxy_variables_do_not_turn_loopback_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert isinstance(await scrape(server.url), Snapshot)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
async def test_every_name_of_this_machine_is_asked_straight(
    server: Server, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The load goes straight to all of these; the counters beside it have to come from the same server."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert isinstance(await scrape(server.url.replace("127.0.0.1", host)), Snapshot)


async def test_a_page_without_end_is_unknown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.web.LARGEST_REPLY_BYTES", 1 << 20)
    server.reply = lambda n: web.Response(body=b"vllm:x 1\n" * (1 << 20))
    found = await scrape(server.url)
    assert isinstance(found, Unknown)
    assert "longer than 1 MiB" in found.reason


async def test_headers_go_along(server: Server) -> None:
    await scrape(server.url, headers={"Authorization": "Bearer sesame"})
    assert server.headers[0]["Authorization"] == "Bearer sesame"


async def test_a_body_that_fails_is_not_hidden_and_the_polls_end(server: Server) -> None:
    with pytest.raises(RuntimeError, match="load"):
        async with metrics_span(server.url, poll_s=0.01) as span:
            raise RuntimeError("the load failed")
    asked = server.asked
    await asyncio.sleep(0.05)
    assert server.asked == asked
    assert span.delta.prefix_hit_rate is None


async def test_cancelling_ends_the_span_at_once(server: Server) -> None:
    async def forever() -> None:
        async with metrics_span(server.url, poll_s=0.01):
            await asyncio.Event().wait()

    task = asyncio.create_task(forever())
    async with asyncio.timeout(10):
        while server.asked < 3:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not re.search("metrics_span|_poll", str([t.get_coro() for t in asyncio.all_tasks()]))
