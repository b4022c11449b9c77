"""A headless Chromium driven over the DevTools protocol: as much of it as the report's tests need."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ANSWER_S = 90.0
"""Longest wait for one answer: the page carries megabytes of script, the machine may be busy."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class CdpError(RuntimeError):
    """The browser refused a command, or a script in the page threw."""


@dataclass
class Page:
    """One tab. Console errors, uncaught exceptions, policy violations and requests are collected."""

    connection: Connection
    session: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.connection.send(method, params, self.session)

    async def open(self, url: str) -> None:
        """Load and wait until the page's own script has run."""
        await self.send("Page.navigate", url=url)
        await self.wait_for(
            "document.readyState === 'complete' && document.documentElement.dataset.drawn !== undefined"
        )

    async def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page; CdpError after the limit."""
        for _ in range(int(ANSWER_S / 0.1)):
            if await self.evaluate(expression):
                return
            await asyncio.sleep(0.1)
        raise CdpError(f"never true: {expression}; problems: {self.problems}")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, promises awaited."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise CdpError(json.dumps(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    async def resize(self, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def color_scheme(self, scheme: str) -> None:
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def pdf(self, path: Path) -> bytes:
        """The page as printed on A4."""
        printed = await self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        data = base64.b64decode(printed["data"])
        path.write_bytes(data)
        return data

    def notice(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(str(details.get("exception", details).get("description", details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


class Connection:
    """The browser's end of the protocol; answers are matched by number, notices go to their page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}

    async def send(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        return await asyncio.wait_for(answer, ANSWER_S)

    async def listen(self) -> None:
        async for message in self._socket:
            value = json.loads(message.data)
            if "id" not in value:
                if value.get("sessionId") in self.pages:
                    self.pages[value["sessionId"]].notice(value["method"], value["params"])
                continue
            answer = self._waiting.pop(value["id"])
            if answer.done():
                continue
            if "error" in value:
                answer.set_exception(CdpError(str(value["error"])))
            else:
                answer.set_result(value["result"])


@contextlib.asynccontextmanager
async def browser(binary: str, profile: Path) -> AsyncIterator[Connection]:
    """A browser with an empty profile folder; its whole process group is ended at the end."""
    process = await asyncio.create_subprocess_exec(
        binary,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    drain: asyncio.Task[None] | None = None
    try:
        assert process.stderr is not None
        address = await asyncio.wait_for(_address(process.stderr), ANSWER_S)
        drain = asyncio.create_task(_drain(process.stderr))
        async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
            connection = Connection(socket)
            listener = asyncio.create_task(connection.listen())
            try:
                yield connection
            finally:
                listener.cancel()
                await asyncio.gather(listener, return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if drain is not None:
            await drain


async def _address(stderr: asyncio.StreamReader) -> str:
    while line := (await stderr.readline()).decode(errors="replace"):
        if match := re.search(r"DevTools listening on (ws://\S+)", line):
            return match[1]
    raise CdpError("Chromium ended before it listened")


async def _drain(stderr: asyncio.StreamReader) -> None:
    while await stderr.read(65536):
        pass


@contextlib.asynccontextmanager
async def new_page(connection: Connection) -> AsyncIterator[Page]:
    """A fresh tab with every notice switched on, closed at the end."""
    target = await connection.send("Target.createTarget", {"url": "about:blank"})
    attached = await connection.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
    page = Page(connection, attached["sessionId"])
    connection.pages[page.session] = page
    for domain in ("Page", "Runtime", "Log", "Network"):
        await page.send(f"{domain}.enable")
    try:
        yield page
    finally:
        del connection.pages[page.session]
        await connection.send("Target.closeTarget", {"targetId": target["targetId"]})
