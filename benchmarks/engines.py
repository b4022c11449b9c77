"""The paced and the simulated engine for the product's own runner, and a setting measured on one start."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.clock import SYSTEM_CLOCK
from tuner.domain.experiment import Results, Start
from tuner.domain.profile import Profile
from tuner.domain.setting import Scalar, Setting
from tuner.errors import NoVerdict
from tuner.experiment.choice import EngineChoice
from tuner.experiment.design import Named, StartPlan, Step
from tuner.experiment.events import Silent
from tuner.experiment.runner import run
from tuner.experiment.session import engine_opener
from tuner.experiment.store import Store

ROOT = Path(__file__).resolve().parents[1]
SERVE = ROOT / "benchmarks" / "paced" / "serve.py"
PACED_ARGS: dict[str, Scalar] = {"tensor_parallel_size": None, "gpu_memory_utilization": None, "block_size": 32}
"""Laid over a profile's options: one worker runs in place of several, and CPU attention takes multiples of 32."""


def paced(profile: Profile, *, scale: float = 1.0, step_log: Path | None = None) -> EngineChoice:
    """A real vLLM with the timing of the profile's hardware; `scale` is a factor on every step's time."""
    more = ["--step-log", str(step_log)] if step_log else []
    launcher = (sys.executable, str(SERVE), "--step-time-scale", str(scale), *more)
    return EngineChoice("vllm", launcher, "for a benchmark", _pretended(profile, scale))


def simulated(profile: Profile, *, scale: float = 1.0) -> EngineChoice:
    """The simulated engine for the profile's hardware."""
    return EngineChoice("sim", (sys.executable, "-m", "tuner.sim"), "for a benchmark", _pretended(profile, scale))


def _pretended(profile: Profile, scale: float) -> dict[str, str]:
    hardware = profile.hardware
    cost_model = hardware.cost_model or profile.model
    settings: dict[str, Any] = {"gpu": hardware.gpu, "count": hardware.count, "cost_model": cost_model}
    return {"CHUNKTUNE_SIM": json.dumps({**settings, "step_time_scale": scale})}


@dataclass(frozen=True)
class OneStart:
    """A design: one start of one setting with so many rounds."""

    plan: StartPlan
    rounds: int

    def next_start(self, results: Results) -> StartPlan | None:
        return None if results.starts else self.plan

    def next_step(self, results: Results, start: Start) -> Step | None:
        done = len(results.kept())
        return Step(self.plan.settings[0], cycle=done, position=0) if done < self.rounds else None


async def measure_start(
    profile: Profile,
    choice: EngineChoice,
    engine_args: dict[str, Scalar],
    setting: Setting,
    rounds: int,
    folder: Path,
    *,
    seed: int = 0,
) -> tuple[Store, Results]:
    """One start of an engine that was started with `setting`; `folder` gets what it measured.

    NoVerdict says why no round counts.
    """
    store = Store(folder)
    named = Named(0, setting)
    args = setting.engine_args(engine_args)
    plan = StartPlan("single", setting.label, args, (named,), live=False, reuse_budget=setting.reuse_budget)
    opener = engine_opener(
        profile, choice, seed=seed, log_path=store.engine_log, record_dir=store.record_dir, events=Silent()
    )
    results = await run(OneStart(plan, rounds), store, opener, SYSTEM_CLOCK, Silent())
    if not results.kept():
        reasons = [row.reason for row in results.rounds]
        raise NoVerdict(results.starts[-1].message or (reasons[-1] if reasons else None) or "no round counts")
    return store, results


def machine() -> dict[str, Any]:
    """Where and on what this was measured."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True, check=False)
    cpu = next((x.partition(":")[2] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "uncommitted_changes": bool(changed.stdout.strip()),
        "machine": {"cpus": os.cpu_count(), "cpu": cpu.strip(), "python": platform.python_version()},
    }
