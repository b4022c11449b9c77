"""One closed-loop round of chunktune's own client; prints JSON. Run as a child of `ruler.py`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from tuner.domain.workload import SharedPrefixWorkload
from tuner.load.drive import drive
from tuner.load.loop import run
from tuner.load.planner import Planner
from tuner.load.probe import probe
from tuner.load.target import Target


async def main(base_url: str, concurrency: int, requests: int, busy_share: float) -> None:
    """`busy_share`: how much of the event loop's time somebody else takes, to make a client that cannot keep up."""
    target = Target(base_url)
    workload = SharedPrefixWorkload(
        system_prompt_tokens=512,
        user_prompt_tokens=(64, 128),
        output_tokens=16,
        concurrency=concurrency,
        requests=requests - concurrency,
    )
    planner = await Planner.open(target, workload, await probe(target), seed=int(time.time()), base_dir=Path())
    plan = planner.plan("ruler", "ruler")
    hog = asyncio.create_task(_hog(busy_share)) if busy_share else None
    observation = await drive(target, plan)
    if hog is not None:
        hog.cancel()
    print(
        json.dumps(
            {
                "ttft_ms": [r.ttft_ms for r in observation.records if r.phase == "measured" and r.ok],
                "failed": sum(not r.ok for r in observation.records),
                "limited": observation.client.limited_reason,
                "discarded": observation.discarded,
            }
        )
    )


async def _hog(share: float) -> None:
    while True:
        time.sleep(0.1 * share)
        await asyncio.sleep(0.1 * (1 - share))


if __name__ == "__main__":
    run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 0.0))
