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
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tuner.domain.setting import CHUNK_KNOB
from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Profile
from tuner.errors import ChunktuneError, NoVerdict
from tuner.measure import summarize
from tuner.profile import load_profile
from tuner.experiment.choice import EngineChoice
from tuner.trial.rounds import EXTRA_ATTEMPTS, counting
from tuner.experiment.session import RoundResult, SessionConfig, engine_session

SERVE = Path(__file__).resolve().parent / "paced" / "serve.py"
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
OVERHEAD = "ms_between_steps"
METRICS = ("ttft_ms.p50", "ttft_ms.p90", "cold_ttft_ms.p50", "cold_ttft_ms.p90", "itl_ms.p50", "prefix_hit_rate",
           "engine_steps", "request_throughput", OVERHEAD)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    name: str
    choice: EngineChoice
    async_scheduling: bool | None


def engines(profile: Profile, wanted: list[str], scale: float, step_log: Path) -> list[Engine]:
    hardware = profile.hardware
    settings: dict[str, Any] = {"gpu": hardware.gpu, "count": hardware.count, "step_time_scale": scale}
    settings["cost_model"] = hardware.cost_model or profile.model
    env = {"CHUNKTUNE_SIM": json.dumps(settings)}
    serve = (sys.executable, str(SERVE), "--step-log", str(step_log), "--step-time-scale", str(scale))
    sim = EngineChoice("sim", (sys.executable, "-m", "tuner.sim"), "for the comparison", env)
    paced = EngineChoice("vllm", serve, "for the comparison", env)
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


def between_steps_ms(step_log: Path) -> float | None:
    """The median time from the end of a step to the start of the next that follows at once."""
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    gaps = [(later["at"] - step["at"]) * 1e3 - step["taken_ms"] for step, later in pairwise(steps)]
    return statistics.median(close) if (close := [gap for gap in gaps if gap < 30]) else None


def shown(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    digits = {"prefix_hit_rate": 3, OVERHEAD: 1}.get(name, 0)
    return f"{value:.{digits}f}"


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
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor on every step's time in both engines; above 1 the host's own speed matters less",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", type=Path, help="keep the engines' logs in this folder")
    arguments = parser.parse_args()
    task = asyncio.current_task()
    assert task is not None
    # So that the engine under way is stopped too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    profile = load_profile(arguments.profile)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for chunk in map(int, arguments.chunks.split(",")):
            step_log = folder / f"steps-{chunk}.jsonl"
            step_log.unlink(missing_ok=True)
            for engine in engines(profile, arguments.engines.split(","), arguments.scale, step_log):
                row: dict[str, Any] = {"chunk": chunk, "engine": engine.name, "metrics": {}, "error": ""}
                try:
                    median = await measure(profile, engine, chunk, arguments.rounds, folder, arguments.seed)
                    row["metrics"] = {name: metric(median, name) for name in METRICS if name != OVERHEAD}
                    if engine.name == "paced":
                        row["metrics"][OVERHEAD] = between_steps_ms(step_log)
                except ChunktuneError as error:
                    row["error"] = error.message
                rows.append(row)
                print(table([row]).splitlines()[1], file=sys.stderr, flush=True)
    if arguments.json:
        load = {"profile": profile.name, "workload": profile.workload.model_dump(mode="json")}
        print(json.dumps({"load": load, "scale": arguments.scale, "cpus": os.cpu_count(), "rows": rows}, indent=2))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
