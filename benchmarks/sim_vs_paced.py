"""The simulated engine beside a real `vllm serve` with a GPU's timing (the paced engine), on one load.

    python benchmarks/sim_vs_paced.py [--profile default] [--chunks 64,512,8192] [--rounds 3] [--json]

Both get the same options, the same KV capacity and the same step-time tables, so what differs is the scheduler,
the cache and the server around them. Two options make them comparable: CPU attention takes blocks of 32 tokens,
and vLLM switches async scheduling off on the CPU, so the simulated engine gets both settings too. A third engine,
the simulated one with async scheduling on, shows what that setting is worth on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.domain.candidate import CHUNK_KNOB
from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Profile
from tuner.errors import ChunktuneError, NoVerdict
from tuner.measure import summarize
from tuner.profile import load_profile
from tuner.trial.launcher import EngineChoice
from tuner.trial.rounds import EXTRA_ATTEMPTS, counting
from tuner.trial.session import RoundResult, SessionConfig, engine_session

SERVE = Path(__file__).resolve().parent / "paced" / "serve.py"
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
METRICS = ("ttft_ms.p50", "ttft_ms.p90", "cold_ttft_ms.p50", "cold_ttft_ms.p90", "itl_ms.p50", "prefix_hit_rate",
           "engine_steps", "request_throughput")  # fmt: skip


@dataclass(frozen=True)
class Engine:
    name: str
    choice: EngineChoice
    async_scheduling: bool | None


def engines(profile: Profile, wanted: list[str]) -> list[Engine]:
    hardware = profile.hardware
    settings = {"gpu": hardware.gpu, "count": hardware.count, "cost_model": hardware.cost_model or profile.model}
    env = {"CHUNKTUNE_SIM": json.dumps(settings)}
    sim = EngineChoice("sim", (sys.executable, "-m", "tuner.sim"), "for the comparison", env)
    paced = EngineChoice("vllm", (sys.executable, str(SERVE)), "for the comparison", env)
    every = [Engine("paced", paced, None), Engine("sim", sim, False), Engine("sim-async", sim, True)]
    return [engine for engine in every if engine.name in wanted]


async def measure(profile: Profile, engine: Engine, chunk: int, rounds: int, folder: Path, seed: int) -> Measurement:
    args = {**profile.engine.args, "block_size": 32, "max_num_seqs": 64, CHUNK_KNOB: chunk}
    if engine.name == "paced":
        # One worker runs; the pretended number of GPUs comes with CHUNKTUNE_SIM.
        args["tensor_parallel_size"] = None
        args["gpu_memory_utilization"] = None
    if engine.async_scheduling is not None:
        args["async_scheduling"] = engine.async_scheduling
    config = SessionConfig.of_profile(
        profile,
        engine.choice,
        args=args,
        reuse_budget=None,
        seed=seed,
        log_path=folder / f"{engine.name}-{chunk}.log",
        record_dir=folder,
    )
    results: list[RoundResult] = []
    async with engine_session(config) as session:
        while len(counting(results)) < rounds and len(results) < rounds + EXTRA_ATTEMPTS:
            results.append(await session.round(f"{engine.name}-{chunk}-{len(results)}"))
    if not counting(results):
        raise NoVerdict(f"no round counts: {results[-1].measurement.void}")
    return summarize([r.measurement for r in results], [r.observation for r in results]).median


def shown(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if name == "prefix_hit_rate" else f"{value:.0f}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'chunk':>6} {'engine':<10}" + "".join(f"{name:>18}" for name in METRICS)]
    for row in rows:
        cells = "".join(f"{shown(row['metrics'].get(name), name):>18}" for name in METRICS)
        lines.append(f"{row['chunk']:>6} {row['engine']:<10}{cells}" + (f"  {row['error']}" if row["error"] else ""))
    pairs: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        pairs.setdefault(row["chunk"], {})[row["engine"]] = row["metrics"]
    for name in ("ttft_ms.p50", "ttft_ms.p90"):
        off = []
        for chunk, by_engine in pairs.items():
            sim, paced = by_engine.get("sim", {}).get(name), by_engine.get("paced", {}).get(name)
            if sim and paced:
                off.append(f"{chunk}: {100 * (sim / paced - 1):+.0f} %")
        if off:
            lines.append(f"sim against paced, {name}: " + ", ".join(off))
    return "\n".join(lines)


async def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", default="default")
    parser.add_argument("--chunks", default=",".join(map(str, CHUNKS)))
    parser.add_argument("--engines", default="paced,sim,sim-async")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs in this folder")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for chunk in map(int, arguments.chunks.split(",")):
            for engine in engines(profile, arguments.engines.split(",")):
                row: dict[str, Any] = {"chunk": chunk, "engine": engine.name, "metrics": {}, "error": ""}
                try:
                    median = await measure(profile, engine, chunk, arguments.rounds, folder, arguments.seed)
                    row["metrics"] = {name: metric(median, name) for name in METRICS}
                except ChunktuneError as error:
                    row["error"] = error.message
                rows.append(row)
                print(table([row]).splitlines()[1], file=sys.stderr, flush=True)
    if arguments.json:
        load = {"profile": profile.name, "workload": profile.workload.model_dump(mode="json")}
        print(json.dumps({"load": load, "cpus": os.cpu_count(), "rows": rows}, indent=2))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
