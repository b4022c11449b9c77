"""A night's worth of engine starts and stops, and what they leave behind: it has to be nothing.

Every way to end takes its turn (see WAYS) on a fast fake engine, and each engine but the plainest has a
process of its own that ignores SIGTERM. Counted at the end: living processes, open files and threads of
this process, ports, records, and the growth of its memory.

    python benchmarks/soak.py [--starts 1000] [--seconds 1500] [--json]

Exit code 1 when anything is left, or when fewer starts fit into the time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tuner.engine.launch import LaunchSpec, RunningEngine, launched, port_is_free
from tuner.errors import EngineError

FAKE = Path(__file__).resolve().parents[1] / "tests" / "fakes" / "fake_vllm.py"
MARK = "CHUNKTUNE_SOAK"
STUBBORN = {"core": "stubborn", "ignore_term": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stubborn": STUBBORN,
    "our own error": {"core": "stubborn"},
    "cancelled": {"core": "stubborn"},
    "cancelled at start": {**STUBBORN, "ready_after_s": 30},
    "failed start": {"core": "stubborn", "start": [{"log": "no_free_memory", "exit": 1}]},
}
SETTLED_AFTER = 20
"""Starts until imports and caches have stopped growing; the memory is compared from there on."""


class OurOwnError(Exception):
    """Stands for a bug of ours in the middle of a trial."""


def spec_for(way: str, folder: Path) -> LaunchSpec:
    return LaunchSpec(
        launcher=(sys.executable, str(FAKE)),
        kind="vllm",
        model="fake/model",
        args={"max_num_batched_tokens": 512},
        env={"FAKE_VLLM": json.dumps(WAYS[way]), MARK: str(folder)},
        log_path=folder / "engine.log",
        startup_timeout_s=30,
        record_dir=folder / "records",
        term_wait_s=0.05,
    )


async def one(way: str, folder: Path) -> int | None:
    """One start and its end; the port where one was seen."""
    seen: list[RunningEngine] = []
    ready = asyncio.Event()

    async def trial() -> None:
        async with launched(spec_for(way, folder)) as engine:
            seen.append(engine)
            ready.set()
            if way == "our own error":
                raise OurOwnError
            if way == "cancelled":
                await asyncio.sleep(60)

    task = asyncio.create_task(trial())
    if way == "cancelled":
        await asyncio.wait({task, waiting := asyncio.create_task(ready.wait())}, return_when="FIRST_COMPLETED")
        waiting.cancel()
        task.cancel()
    elif way == "cancelled at start":
        await asyncio.sleep(0.15)
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        if not way.startswith("cancelled"):
            raise
    except OurOwnError:
        pass
    except EngineError as error:
        if (way, error.diagnosis.code) != ("failed start", "no_free_memory"):
            raise
    return seen[0].port if seen else None


def living(folder: Path) -> list[int]:
    """Processes of ours that still run, by the mark in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={folder}".encode() in environ and state not in "ZX":
            found.append(int(entry))
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(starts: int, seconds: float, folder: Path) -> dict[str, Any]:
    ways = list(WAYS)
    ends: Counter[str] = Counter()
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    ports_left = 0
    worst_left = 0
    began_s = time.monotonic()
    files = threads = 0
    mib = 0.0
    for number in range(starts):
        if time.monotonic() - began_s > seconds:
            break
        if number == min(SETTLED_AFTER, starts - 1):
            files, threads, mib = open_files(), threading.active_count(), resident_mib()
        way = ways[number % len(ways)]
        start_s = time.monotonic()
        port = await one(way, folder)
        times_s[way].append(time.monotonic() - start_s)
        ends[way] += 1
        if port is not None and not port_is_free(port):
            # Looked at now, not at the end: by then a stranger may have been given the number.
            ports_left += 1
        worst_left = max(worst_left, len(living(folder)))
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{starts}", end="", file=sys.stderr, flush=True)
    return {
        "starts": sum(ends.values()),
        "asked": starts,
        "seconds": round(time.monotonic() - began_s, 1),
        "ways": {way: {"ends": ends[way], "median_s": round(median(times_s[way]), 3)} for way in ways},
        "left": {
            "processes": worst_left,
            "open_files": open_files() - files,
            "threads": threading.active_count() - threads,
            "ports": ports_left,
            "records": len(list((folder / "records").glob("engine-*"))),
        },
        "memory_growth_mib": round(resident_mib() - mib, 1),
    }


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1500.0, help="give up after this long")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(given.starts, given.seconds, Path(folder)))
    clean = not any(result["left"].values()) and result["starts"] == result["asked"]
    if given.json:
        print(json.dumps({**result, "clean": clean}, indent=2))
        return 0 if clean else 1
    print(f"{result['starts']} of {result['asked']} starts in {result['seconds']:.0f} s\n")
    print(f"{'way to end':<20} {'ends':>6} {'median s':>9}")
    for way, row in result["ways"].items():
        print(f"{way:<20} {row['ends']:>6} {row['median_s']:>9.2f}")
    print(f"\n{'left behind':<20} {'count':>6}")
    for what, count in result["left"].items():
        print(f"{what.replace('_', ' '):<20} {count:>6}")
    print(f"\nmemory grew by {result['memory_growth_mib']} MiB; {'nothing left' if clean else 'NOT CLEAN'}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
