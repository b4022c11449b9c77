"""The leanest closed loop on aiohttp as it is: uvloop, connections opened before, chunks kept with their time and
parsed after the round. A peer of `ruler.py`, and its yardstick at 256 streams; prints JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time

import aiohttp
import orjson
import uvloop

PROMPT = "You are a helpful assistant. " * 100


async def main(base_url: str, concurrency: int, requests: int) -> None:
    url = f"{base_url}/v1/completions"
    kept: list[tuple[float, list[float], list[bytes]]] = []
    numbers = iter(range(requests))
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def open_one() -> None:
            async with session.get(f"{base_url}/health") as response:
                await response.read()

        await asyncio.gather(*(open_one() for _ in range(concurrency)))

        async def loop() -> None:
            for number in numbers:
                body = orjson.dumps(
                    {"model": "mock-model", "prompt": f"{PROMPT} {number}", "max_tokens": 16, "stream": True}
                )
                times: list[float] = []
                chunks: list[bytes] = []
                kept.append((time.monotonic(), times, chunks))
                async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                    async for chunk in response.content.iter_any():
                        times.append(time.monotonic())
                        chunks.append(chunk)

        gc.collect()
        gc.freeze()
        gc.disable()
        await asyncio.gather(*(loop() for _ in range(concurrency)))
    ttft_ms: list[float] = []
    failed = 0
    for sent_s, times, chunks in kept[concurrency:]:
        first = None
        done = False
        for at_s, chunk in zip(times, chunks, strict=True):
            for line in chunk.split(b"\n"):
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    choices = orjson.loads(line[6:])["choices"]
                    if first is None and choices and choices[0].get("text") is not None:
                        first = at_s
        if first is None or not done:
            failed += 1
        else:
            ttft_ms.append((first - sent_s) * 1e3)
    print(json.dumps({"ttft_ms": ttft_ms, "failed": failed}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
