"""The loads of benchmarks/reuse_budget.py: closed-loop clients with long prompts, and visitors at a fixed pace."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import aiohttp

TOKEN_IDS = range(3, 250)
"""Ids that every byte-level vocabulary has, none of them special."""


@dataclass(frozen=True)
class Load:
    """What comes: `clients` that each send one prompt of their own after the other, and a visitor every `every_s`."""

    what: str
    kv_tokens: int
    clients: int = 4
    client_tokens: int = 3000
    client_output: int = 6
    tenants: int = 1
    system_tokens: int = 2000
    visitor_tokens: int = 64
    visitor_output: int = 8
    every_s: float = 2.5
    max_cached_blocks: int = 80


LOADS = {
    "one-tenant": Load("one shared system prompt among long prompts of one's own", kv_tokens=20_480),
    "tenants": Load(
        "four tenants with system prompts of 1,200 tokens visit in turn",
        kv_tokens=20_480,
        tenants=4,
        system_tokens=1200,
        every_s=1.25,
        max_cached_blocks=160,
    ),
    "thrash": Load("a pool of 2.5 sequences: everything thrashes", kv_tokens=7_680),
    "decoding": Load(
        "one shared system prompt, and most of the pool held by requests that decode",
        kv_tokens=20_480,
        clients=8,
        client_tokens=1500,
        client_output=64,
    ),
    "none": Load("nothing is shared: visitors' prompts are new", kv_tokens=20_480, tenants=0),
}


@dataclass
class Answer:
    """One request: whose, when it was sent (s after the start of the run), and its first and last token (ms)."""

    who: str
    sent_s: float
    ttft_ms: float
    total_ms: float


def tokens(seed: str, count: int) -> list[int]:
    """The same ids for the same seed."""
    return random.Random(seed).choices(TOKEN_IDS, k=count)


class Run:
    """One run of a load against a server; contents depend on `key` alone."""

    def __init__(self, load: Load, base_url: str, model: str, key: str, seconds: float) -> None:
        self._load = load
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._key = key
        self._seconds = seconds
        self._started_s = 0.0
        self._sessions: aiohttp.ClientSession
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    async def drive(self) -> None:
        """Two visits of each tenant and one prompt of each client first, which do not count; then `seconds` of load."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as self._sessions:
            for visit in range(2 * max(1, self._load.tenants)):
                await self._visit(visit - 1000, counted=False)
            self._started_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for client in range(self._load.clients):
                    group.create_task(self._client(client))
                group.create_task(self._visitors())

    async def _client(self, client: int) -> None:
        await asyncio.sleep(client * 0.2)
        number = 0
        while self._left_s() > 0:
            prompt = tokens(f"{self._key}/client/{client}/{number}", self._load.client_tokens)
            await self._ask("client", prompt, self._load.client_output, counted=number > 0)
            number += 1

    async def _visitors(self) -> None:
        async with asyncio.TaskGroup() as group:
            visit = 0
            while self._left_s() > 0:
                await asyncio.sleep(max(0.0, self._started_s + (visit + 1) * self._load.every_s - time.monotonic()))
                if self._left_s() > 0:
                    group.create_task(self._visit(visit, counted=True))
                visit += 1

    async def _visit(self, visit: int, *, counted: bool) -> None:
        load = self._load
        whose = f"system/{visit % load.tenants}" if load.tenants else f"new/{visit}"
        prompt = tokens(f"{self._key}/{whose}", load.system_tokens)
        prompt = prompt + tokens(f"{self._key}/visit/{visit}", load.visitor_tokens)
        await self._ask("visitor", prompt, load.visitor_output, counted=counted)

    async def _ask(self, who: str, prompt: list[int], output: int, *, counted: bool) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        started = time.monotonic()
        first = 0.0
        try:
            async with self._sessions.post(self._url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        if b'"error"' in line:
                            raise aiohttp.ClientError(json.loads(line[6:])["error"])
                        first = first or time.monotonic()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures.append(f"{who}: {error!r}")
            await asyncio.sleep(0.2)
            return
        if counted:
            ended = time.monotonic()
            self.answers.append(
                Answer(who, started - self._started_s, (first - started) * 1e3, (ended - started) * 1e3)
            )

    def _left_s(self) -> float:
        return self._started_s + self._seconds - time.monotonic()


async def ask_one_token(base_url: str, model: str) -> None:
    """A request of one token, which brings the engine to look for a command."""
    body = {"model": model, "prompt": [3], "max_tokens": 1}
    async with aiohttp.ClientSession() as session, session.post(f"{base_url}/v1/completions", json=body) as response:
        response.raise_for_status()
