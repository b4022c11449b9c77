"""Landscapes for `search.py`: rounds of many settings, recorded from the simulated engine in virtual time.

    nice -n 10 python benchmarks/search_landscapes.py --work FOLDER [--cycles N] [--only NAME,NAME]   # records
    python benchmarks/search_landscapes.py --work FOLDER --pack                                       # writes the file

A landscape is a profile's load on every chunk size of a grid of 128 tokens between the ends of its list, with every
combination of its other knobs. The rounds of a cycle share lengths and arrivals, made by the load planner of the
product itself; contents are new in each. Steps scatter by 2 % each, rounds by 1 % as a whole. Recording goes on
where it stopped, so cycles can be added. Twenty cycles of all landscapes take about 45 minutes on one core.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import itertools
import json
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import orjson

from tuner.domain.profile import Profile
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Setting
from tuner.load.plan import Arrivals, PlannedRequest
from tuner.load.planner import make_load
from tuner.load.prompting import Prompter
from tuner.load.vocabulary import Vocabulary
from tuner.measure.percentiles import latency
from tuner.profile import load_profile
from tuner.scheduler.decisions import Budget
from tuner.sim.core import Core, Request, SchedulerConfig
from tuner.sim.cost import MeasuredCost
from tuner.sim.pipeline import Pipeline, Timing
from tuner.sim.policy import BudgetPolicy
from tuner.sim.tables import plan_memory

FILE = Path(__file__).with_name("landscapes.json.gz")
PROFILES = Path(__file__).resolve().parent.parent / "profiles"
GRID = 128
STOCK_CHUNK = 8192
"""What `vllm serve` takes on these GPUs."""
STEP_NOISE, ROUND_NOISE = 0.02, 0.01
THRESHOLD = "long_prefill_token_threshold"
METRICS = ("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "itl_ms.p99")
"""Recorded of every round, beside the metrics of classes and the seconds that the round took."""


@dataclass(frozen=True)
class Source:
    """Which profile a landscape is recorded from."""

    profile: str
    cycles: int
    changes: tuple[str, ...] = ()
    """Overrides, as `--set` takes them."""
    classes: tuple[str, ...] = ()
    """Metrics of classes to record."""


SOURCES = {
    "default": Source("default", 20),
    "mixed": Source("mixed", 20),
    "long-documents": Source("long-documents", 20),
    "open-loop": Source("open-loop", 20),
    "llama-8b": Source("llama-8b", 20),
    "tenants": Source(
        "tenants",
        20,
        (
            "engine.args.max_num_batched_tokens=null",
            "space.max_num_batched_tokens=[512, 1024]",
            "workload.classes=[{name: busy, user_prompt_tokens: 3000, output_tokens: [16, 48]}, {name: visitor, "
            "visit_every: 2.5s, system_prompt_tokens: 2000, user_prompt_tokens: [32, 128], output_tokens: [8, 24]}]",
        ),
        classes=("groups.visitor.p50", "groups.busy.p90"),
    ),
}


def profile_of(name: str) -> Profile:
    return load_profile(SOURCES[name].profile, list(SOURCES[name].changes))


def grid(profile: Profile, unit: int = GRID) -> list[int]:
    """Every multiple of the unit between the ends of the profile's list of chunks, and the list itself."""
    listed = [c for c in profile.space.knobs[CHUNK_KNOB] if isinstance(c, int)]
    return sorted({*range(math.ceil(min(listed) / unit) * unit, max(listed) + 1, unit), *listed})


def all_chunks(profile: Profile) -> list[int]:
    """What is recorded: the grid, and stock's own chunk."""
    return sorted({*grid(profile), STOCK_CHUNK})


def settings(profile: Profile, chunks: list[int]) -> list[Setting]:
    """Every combination that differs in what it does: inert thresholds and budgets are left out."""
    thresholds = profile.space.knobs.get(THRESHOLD, [0])
    names = list(profile.space.reuse_budget)
    budgets = []
    for values in itertools.product(*profile.space.reuse_budget.values()):
        given = {name: value for name, value in zip(names, values, strict=True) if value}
        if "yield_chunk_tokens" in given and "min_reuse_ratio" not in given:
            continue
        budgets.append(ReuseBudget.model_validate(given) if given else None)
    found = []
    for chunk, threshold, budget in itertools.product(chunks, thresholds, budgets or [None]):
        if threshold < chunk:
            knobs = {CHUNK_KNOB: chunk, **({THRESHOLD: threshold} if threshold else {})}
            found.append(Setting(knobs=knobs, reuse_budget=budget))
    return found


class Recorder:
    """One landscape's engine and load."""

    def __init__(self, name: str) -> None:
        self.profile = profile_of(name)
        self.name = name
        hardware, args = self.profile.hardware, self.profile.engine.args
        tp = int(args.get("tensor_parallel_size", 1))
        model = hardware.cost_model or self.profile.model
        self._cost = MeasuredCost(model, hardware.gpu, tp)
        chunks = grid(self.profile)
        boot = max(STOCK_CHUNK, *chunks)
        memory = plan_memory(model, hardware.gpu, tp, chunk=boot, max_num_seqs=128, utilization=0.9)
        blocks = int(args.get("num_gpu_blocks_override") or memory.kv_tokens // 16)
        self._config = {"max_num_seqs": 128, "max_model_len": int(args["max_model_len"]), "num_blocks": blocks}
        self.settings = settings(self.profile, all_chunks(self.profile))
        prompter = Prompter("m", "completions", Vocabulary(tuple(range(100, 900)), ()), ids=True)
        self._load = make_load(self.profile.workload, prompter, 0, PROFILES)

    def round(self, setting: Setting, cycle: int) -> dict[str, float]:
        key = f"{self.name}/{cycle}/{setting.key}"
        config = SchedulerConfig(
            max_num_batched_tokens=setting.chunk or STOCK_CHUNK,
            long_prefill_token_threshold=int(setting.knobs.get(THRESHOLD) or 0),
            **self._config,
        )
        policy = None
        if setting.reuse_budget is not None:
            policy = BudgetPolicy(Budget.from_mapping(setting.reuse_budget.model_dump()), config.num_blocks)
        seed = zlib.crc32(key.encode())
        scale = math.exp(np.random.default_rng(seed).normal(0, ROUND_NOISE))
        pipeline = Pipeline(Core(config, policy), self._cost, Timing(scale=scale, noise=STEP_NOISE, seed=seed))
        return self._measured(drive(pipeline, self._load.arrivals(key, f"cycle-{cycle}")))

    def _measured(self, sent: list[Sent]) -> dict[str, float]:
        measured = [s for s in sent if s.measured]
        gaps = latency([(b - a) * 1e3 for s in measured for a, b in pairwise(s.token_times_s)])
        found = {f"ttft_ms.{q}": _ttft(measured, q) for q in ("p50", "p90", "p99")}
        found["itl_ms.p99"] = math.nan if gaps is None else gaps.p99
        for path in SOURCES[self.name].classes:
            _, group, statistic = path.split(".")
            found[path] = _ttft([s for s in measured if s.request.group == group], statistic)
        found["seconds"] = max(s.token_times_s[-1] for s in sent)
        return found


def _ttft(sent: list[Sent], statistic: str) -> float:
    found = latency([(s.token_times_s[0] - s.at_s) * 1e3 for s in sent])
    return math.nan if found is None else float(getattr(found, statistic))


@dataclass
class Sent:
    """A request on its way through virtual time."""

    request: PlannedRequest
    source: int
    at_s: float
    measured: bool
    token_times_s: list[float] = field(default_factory=list)


def drive(pipeline: Pipeline, arrivals: Sequence[Arrivals]) -> list[Sent]:
    """One round as `tuner.load.drive` sends it: the leading process, and others beside it until it is done."""
    due: list[tuple[float, int, int]] = []
    """When, an order for ties, and of which process the next request is sent."""
    order = count()
    taken = [0] * len(arrivals)
    sent: list[Sent] = []
    by_id: dict[str, Sent] = {}
    prefixes: set[int] = set()
    lead_left = arrivals[0].count or 0
    for source, plan in enumerate(arrivals):
        for _ in range(plan.concurrency or 1):
            heapq.heappush(due, (0.0, next(order), source))

    def send(at_s: float, source: int) -> None:
        plan, position = arrivals[source], taken[source]
        if lead_left == 0 or (plan.count is not None and position >= plan.count):
            return
        request = plan.request(position)
        taken[source] += 1
        first = request.prefix is not None and request.prefix not in prefixes
        prefixes.update(() if request.prefix is None else (request.prefix,))
        cold = position < plan.cold or (plan.firsts_are_cold and first)
        one = Sent(request, source, at_s, not cold and (source == 0 or any(s.measured for s in sent)))
        sent.append(one)
        name = f"r{len(sent)}"
        by_id[name] = one
        pipeline.core.add(Request(name, orjson.loads(request.body)["prompt"], request.output_tokens or 1, at_s))
        if plan.concurrency is None and (plan.count is None or taken[source] < plan.count):
            heapq.heappush(due, (plan.request(taken[source]).at_s or 0.0, next(order), source))

    while True:
        end_s = pipeline.due_s
        if due and (end_s is None or due[0][0] <= end_s):
            now_s = due[0][0]
            while due and due[0][0] <= now_s:
                at_s, _, source = heapq.heappop(due)
                send(at_s, source)
        elif end_s is not None:
            now_s = end_s
        else:
            return sent
        for step_end_s, tokens in pipeline.advance(now_s):
            for token in tokens:
                one = by_id[token.request.id]
                one.token_times_s.append(step_end_s)
                if token.finished is not None:
                    lead_left -= one.source == 0
                    if arrivals[one.source].concurrency is not None:
                        heapq.heappush(due, (step_end_s, next(order), one.source))


def record(name: str, work: Path, cycles: int) -> None:
    """Add cycles to the landscape's lines, one file a landscape, one line a cycle."""
    path = work / f"{name}.jsonl"
    done = len(path.read_text().splitlines()) if path.exists() else 0
    recorder = Recorder(name)
    columns = [*METRICS, *SOURCES[name].classes, "seconds"]
    with path.open("a") as lines:
        for cycle in range(done, cycles):
            rows = [recorder.round(setting, cycle) for setting in recorder.settings]
            lines.write(json.dumps([[float(f"{row[c]:.4g}") for c in columns] for row in rows]) + "\n")
            lines.flush()
            print(f"{name}: cycle {cycle + 1} of {cycles}", file=sys.stderr)


def pack(work: Path) -> None:
    """All landscapes into the file that the benchmark reads."""
    packed = {}
    for name in SOURCES:
        path = work / f"{name}.jsonl"
        if path.exists():
            found = [s.to_json() for s in settings(profile_of(name), all_chunks(profile_of(name)))]
            columns = [*METRICS, *SOURCES[name].classes, "seconds"]
            rounds = [json.loads(line) for line in path.read_text().splitlines()]
            packed[name] = {"columns": columns, "settings": found, "rounds": rounds}
    FILE.write_bytes(gzip.compress(json.dumps(packed, separators=(",", ":")).encode(), mtime=0))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cycles", type=int, help="of each landscape; by default as many as the table here says")
    parser.add_argument("--only", default=",".join(SOURCES))
    parser.add_argument("--pack", action="store_true")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.only.split(",") if not arguments.pack else ():
        record(name, arguments.work, min(arguments.cycles or SOURCES[name].cycles, SOURCES[name].cycles))
    if arguments.pack:
        pack(arguments.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
