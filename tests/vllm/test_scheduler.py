"""The scheduler plug-in inside the real vLLM: the same tokens as stock, and nobody starves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tuner.domain.setting import ReuseBudget
from tuner.engine.launch import LaunchSpec, RunningEngine, launched
from tuner.errors import EngineError
from tuner.scheduler.decisions import Counters

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ALL_ON = ReuseBudget(
    max_cached_blocks=40,
    min_reuse_ratio=0.5,
    max_hold_ms=200.0,
    yield_chunk_tokens=128,
    merge_below=0.6,
    evict_above=0.1,
)
MARK = "chunktune counters:"
LIMIT_S = 240.0
"""Far above what anything here takes, far below for ever."""
Prompt = list[int]


def ids(seed: str, count: int) -> Prompt:
    return random.Random(seed).choices(range(3, 250), k=count)


class Client:
    """Requests with exact prompts against one engine."""

    def __init__(self, engine: RunningEngine, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self._session = session

    async def ask(self, prompt: Prompt, tokens: int) -> tuple[int, ...]:
        """The ids of `tokens` greedy tokens."""
        body = {
            "model": self.engine.model_id,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with self._session.post(f"{self.engine.base_url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            got = tuple(answer["choices"][0]["token_ids"])
            assert len(got) == tokens
            return got

    async def all(self, plan: list[tuple[Prompt, int]]) -> list[tuple[int, ...]]:
        """All at once."""
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(self.ask(prompt, tokens) for prompt, tokens in plan))

    async def forget(self) -> None:
        """Empty the prefix cache."""
        async with self._session.post(f"{self.engine.base_url}/reset_prefix_cache") as response:
            assert response.status == 200

    async def metric(self, name: str) -> float:
        """The sum of a metric over its series."""
        async with self._session.get(f"{self.engine.base_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)

    async def is_idle(self) -> None:
        """Wait until nothing runs, waits or holds a block."""
        async with asyncio.timeout(LIMIT_S):
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                while await self.metric(name) != 0:
                    await asyncio.sleep(0.2)


@asynccontextmanager
async def serving(spec: LaunchSpec) -> AsyncIterator[Client]:
    async with (
        launched(spec) as engine,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=LIMIT_S)
        ) as session,
    ):
        yield Client(engine, session)


async def counters_of(client: Client) -> Counters:
    """What the plug-in did so far. It speaks at most once a second when it gets idle."""
    await client.is_idle()
    await asyncio.sleep(1.1)
    await client.ask(ids("speak", 40), 1)
    await client.ask(ids("speak", 40), 1)
    lines = [line for line in client.engine.log_path.read_text().splitlines() if MARK in line]
    return Counters.from_line(lines[-1].partition(MARK)[2])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(launch_spec: Callable[..., LaunchSpec]) -> AsyncIterator[Client]:
    async with serving(launch_spec()) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight(launch_spec: Callable[..., LaunchSpec]) -> AsyncIterator[Client]:
    """All policies on, and a KV pool of 2.5 of the longest sequences."""
    async with serving(launch_spec(ALL_ON, num_gpu_blocks_override=160)) as client:
        yield client


def mixed_plan() -> list[tuple[Prompt, int]]:
    """Prompts with a common beginning among prompts of their own, long among short."""
    shared = ids("system", 700)
    plan = [(shared + ids(f"own/{number}", 40), 12) for number in range(20)]
    plan += [(ids(f"long/{number}", 1500), 8) for number in range(8)]
    plan += [(ids(f"short/{number}", 50), 24) for number in range(20)]
    random.Random(1).shuffle(plan)
    return plan


async def test_the_tokens_are_as_identical_to_stock_as_two_stock_runs_are(
    stock: Client, launch_spec: Callable[..., LaunchSpec]
) -> None:
    plan = mixed_plan()
    first = await stock.all(plan)
    await stock.forget()
    second = await stock.all(plan)
    spec = launch_spec(ALL_ON)
    async with serving(spec) as client:
        with_plugin = await client.all(plan)
        again = await client.all(plan)
        did = await counters_of(client)
    stock_differs = sum(one != other for one, other in zip(first, second, strict=True))
    for mine in (with_plugin, again):
        assert sum(one != other for one, other in zip(first, mine, strict=True)) <= stock_differs
    assert did.preferred_requests > 0
    assert did.merged_chunks == 0, "a step of 512 tokens has no two chunks of 512 to merge"


async def test_preemption_changes_no_token(stock: Client, tight: Client) -> None:
    plan = [(ids(f"grow/{number}", 300), 400) for number in range(12)]
    before = await tight.metric("vllm:num_preemptions_total")
    assert await tight.all(plan) == await stock.all(plan)
    assert await tight.metric("vllm:num_preemptions_total") > before


async def test_sixty_four_at_once_on_a_cold_cache_are_all_answered(tight: Client) -> None:
    await tight.is_idle()
    await tight.forget()
    await tight.all([(ids(f"cold/{number}", 200 + 25 * number), 4) for number in range(64)])
    await tight.is_idle()


async def test_one_with_a_cold_prompt_is_answered_while_cached_ones_keep_coming(tight: Client) -> None:
    shared = ids("popular", 640)
    await tight.ask(shared + ids("first", 8), 2)
    answered = asyncio.Event()
    served = 0

    async def keep_coming(client: int) -> None:
        nonlocal served
        for number in range(400):
            if answered.is_set():
                return
            await tight.ask(shared + ids(f"popular/{client}/{number}", 8), 2)
            served += 1

    async def cold() -> None:
        await asyncio.sleep(0.5)
        await tight.ask(ids("cold one", 1800), 4)
        answered.set()

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(cold(), *(keep_coming(client) for client in range(12)))
    assert answered.is_set()
    assert served < 12 * 400, "the cold one was only answered when nobody else came"


async def test_cancelled_requests_leave_nothing_behind(tight: Client) -> None:
    shared = ids("cancelled", 600)
    asks = [
        asyncio.create_task(tight.ask((shared if number % 3 else []) + ids(f"c/{number}", 500), 60))
        for number in range(64)
    ]
    await asyncio.sleep(0.15)  # an idle machine has answered them all within a second
    for task in asks[::2]:
        task.cancel()
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*asks, return_exceptions=True)
    assert all(isinstance(result, tuple) for result in results[1::2])
    assert any(isinstance(result, asyncio.CancelledError) for result in results[::2])
    await tight.is_idle()
    assert len(await tight.ask(ids("after", 900), 3)) == 3


async def test_the_engine_survives_ten_thousand_mixed_requests(tight: Client) -> None:
    choose = random.Random(4)
    numbers = iter(range(10_000))
    systems = [ids(f"system/{tenant}", 320) for tenant in range(4)]
    done = cancelled = 0

    async def client() -> None:
        nonlocal done, cancelled
        for number in numbers:
            kind = choose.random()
            length = 1200 if kind > 0.99 else choose.randint(1, 90)
            prompt = (systems[number // 50 % 4] if kind < 0.5 else []) + ids(f"mixed/{number}", length)
            task = asyncio.create_task(tight.ask(prompt, choose.randint(1, 3)))
            if kind > 0.96 and kind < 0.99:
                await asyncio.sleep(0.01)
                task.cancel()
            try:
                await task
                done += 1
            except asyncio.CancelledError:
                cancelled += 1

    async with asyncio.timeout(900.0):
        await asyncio.gather(*(client() for _ in range(64)))
    assert done + cancelled == 10_000
    assert cancelled > 0
    counters = await counters_of(tight)
    assert counters.preferred_requests > 100
    assert counters.spared_blocks > 0
    assert counters.held_requests > 0
    assert counters.early_evictions > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_prefix_caching": False}, "chunktune: the reuse budget cannot run here: prefix caching is off"),
        ({"scheduling_policy": "priority"}, "--scheduling-policy is not fcfs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_what_it_cannot_serve_is_refused_in_one_line(
    launch_spec: Callable[..., LaunchSpec], options: dict[str, Any], says: str
) -> None:
    spec = launch_spec(ALL_ON, **options)
    with pytest.raises(EngineError):
        async with serving(spec):
            pass
    assert any(says in line for line in spec.log_path.read_text().splitlines())
