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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import PACED_ARGS, measure_start, paced, simulated  # noqa: E402
from tuner.domain.measurement import Measurement, metric  # noqa: E402
from tuner.domain.profile import Profile  # noqa: E402
from tuner.domain.setting import CHUNK_KNOB, Scalar, Setting  # noqa: E402
from tuner.errors import ChunktuneError  # noqa: E402
from tuner.experiment.choice import EngineChoice  # noqa: E402
from tuner.measure import summarize  # noqa: E402
from tuner.profile import load_profile  # noqa: E402

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
OVERHEAD = "ms_between_steps"
METRICS = ("ttft_ms.p50", "ttft_ms.p90", "cold_ttft_ms.p50", "cold_ttft_ms.p90", "itl_ms.p50", "prefix_hit_rate",
           "engine_steps", "request_throughput", OVERHEAD)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """An engine, and the options that it gets beside the profile's."""

    name: str
    choice: EngineChoice
    args: dict[str, Scalar]


def engines(profile: Profile, wanted: list[str], scale: float, step_log: Path) -> list[Engine]:
    """The engines asked for, all with the same blocks and the same slots."""
    same: dict[str, Scalar] = {"block_size": 32, "max_num_seqs": 64}
    sim = simulated(profile, scale=scale)
    every = [
        Engine("paced", paced(profile, scale=scale, step_log=step_log), {**same, **PACED_ARGS}),
        Engine("sim", sim, {**same, "async_scheduling": False}),
        Engine("sim-async", sim, {**same, "async_scheduling": True}),
    ]
    return [engine for engine in every if engine.name in wanted]


async def measure(profile: Profile, engine: Engine, chunk: int, rounds: int, folder: Path, seed: int) -> Measurement:
    """The median of the rounds; the start is kept in a folder of its own."""
    args = {**profile.engine.args, **engine.args}
    setting = Setting(knobs={CHUNK_KNOB: chunk})
    own = folder / f"{engine.name}-{chunk}"
    _, results = await measure_start(profile, engine.choice, args, setting, rounds, own, seed=seed)
    return summarize([row.measurement for row in results.kept()]).median


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
    parser.add_argument("--logs", type=Path, help="keep what was measured, and the engines' logs, in this new folder")
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
