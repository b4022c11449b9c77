"""What the scheduler plug-in adds to one schedule() call, against vLLM's own class in the same run.

    python benchmarks/scheduler_cost.py [--running 256] [--waiting 256] [--blocks 20000] [--json]

Builds both schedulers without a model, gives them the same requests and the same sampled tokens, and times
schedule() of each step on both, in turn, in CPU time of the thread. `added` is the mean of the step-by-step
differences with its 95 % interval (steps differ in what they allocate, so medians of two distributions would not see
the dear ones). `own` is the time spent in the plug-in's own code, the clock stopped while vLLM's schedule() runs
inside it: its mean and P95 as measured, and `work`, the mean over the steps of each step's median over the repeats.
Every repeat does the same work in the same step, so this keeps the dear steps and leaves out what the machine does
meanwhile, interrupts of a virtual machine above all. The limit is on `added`, and on `work` where it is not known.
Runs itself in the Python of the `vllm` command (--vllm, CHUNKTUNE_TEST_VLLM, or the project's vLLM environment).
--json prints the figures instead of the table.

Cases: `slots` every slot is taken, so nothing waiting can get in; `budget` slots are free but running requests use
up the step's tokens, so that the waiting are looked at in every step; `blind` the same with nothing in common
between prompts; `pressure` as `budget` with the pool above the eviction threshold; `tenants` as `pressure` with the
prompts of seven more tenants kept, none of which is in use; `turnover` as `tenants`, and in every step one request
ends, one arrives and one of the waiting, half of which share their prompt, gets in: the two classes let different
ones in, so only the plug-in's own time says something. `live` is the live scheduler without a budget, under the load
of `budget`: what its counting costs while tuning. Yielding is on only in `blind`, where nobody is let through:
elsewhere it would change what a step does, which is not its price.

The first step after the collector ran finds no cache line warm and is not counted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 16
STEP_TOKENS = 2048
LIMIT_US = 100.0
ALL_ON = {
    "max_cached_blocks": 2000,
    "min_reuse_ratio": 0.5,
    "max_hold_ms": 1000.0,
    "merge_below": 0.6,
}
CASES: dict[str, dict[str, Any]] = {
    "slots": {"shared": True, "slots": 0, "budget": {"max_cached_blocks": 2000, "min_reuse_ratio": 0.5}},
    "budget": {"shared": True, "slots": 256, "budget": ALL_ON},
    "blind": {"shared": False, "slots": 256, "budget": {**ALL_ON, "yield_chunk_tokens": 256}},
    "pressure": {"shared": True, "slots": 256, "budget": {**ALL_ON, "evict_above": 0.1}},
    "tenants": {"shared": True, "slots": 256, "budget": {**ALL_ON, "evict_above": 0.1}, "tenants": 7},
    "turnover": {
        "shared": True,
        "slots": 0,
        "budget": {**ALL_ON, "evict_above": 0.1},
        "tenants": 7,
        "turnover": True,
    },
    "live": {"shared": True, "slots": 256, "budget": {}, "live": True},
}


def vllm_python(command: str | None) -> str:
    """The interpreter beside the `vllm` command."""
    found = command or os.environ.get("CHUNKTUNE_TEST_VLLM") or str(ROOT / ".venv-vllm" / "bin" / "vllm")
    python = Path(found).with_name("python")
    if not python.exists():
        sys.exit(f"no Python beside {found}: name the vllm command with --vllm")
    return str(python)


def build(cls: type, model: str, *, running: int, slots: int, blocks: int, budget: dict[str, Any]) -> Any:
    """A scheduler of class `cls`, without an engine around it."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=model, tokenizer=model, dtype="float32", seed=0, max_model_len=131072),
        scheduler_config=SchedulerConfig(
            max_num_seqs=running + slots + 8,
            max_num_batched_tokens=STEP_TOKENS + running,
            max_model_len=131072,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=True),
        additional_config={"chunktune": budget} if budget else {},
    )
    # vLLM turns it off on the CPU, and the live scheduler takes the class that goes with it.
    config.scheduler_config.async_scheduling = True
    if not slots:
        config.scheduler_config.max_num_active_seqs = running
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def new_request(name: str, prompt: list[int], tokens: int) -> Any:
    """A request as the engine core makes it."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, prompt, sampling, None, block_hasher=hasher)


INSIDE_NS = [0]
"""What vLLM's own schedule() has taken so far."""


def watch_vllm() -> None:
    """Let vLLM's schedule() say how long it takes, called from the plug-in or from here."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.schedule

    @functools.wraps(original)
    def schedule(self: Any, *args: Any) -> Any:
        started = time.thread_time_ns()
        output = original(self, *args)
        INSIDE_NS[0] += time.thread_time_ns() - started
        return output

    Scheduler.schedule = schedule


def step(scheduler: Any) -> tuple[int, int]:
    """One step with the same sampled token for everybody; ns that schedule() took, and that vLLM's own part took."""
    from vllm.v1.outputs import ModelRunnerOutput

    inside, started = INSIDE_NS[0], time.thread_time_ns()
    output = scheduler.schedule()
    taken = time.thread_time_ns() - started
    inside = INSIDE_NS[0] - inside
    ids = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[each].is_prefill_chunk else [7] for each in ids]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={each: index for index, each in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    return taken, inside


SYSTEM_PROMPT = list(range(1000, 1512))
OUTPUT_TOKENS = 4000
"""More than any run has steps."""


def waiting_request(name: str, index: int, *, shared: bool) -> Any:
    """Every other one has little but the system prompt, where there is one."""
    own = [5_000_000 + index * 1024 + each for each in range(64 if shared and index % 2 else 1024)]
    return new_request(name, (SYSTEM_PROMPT if shared else []) + own, OUTPUT_TOKENS)


def fill(scheduler: Any, case: dict[str, Any], *, running: int, waiting: int) -> None:
    """Decoding requests, those that wait, and without turnover an endless prompt that takes what a step has left."""
    for tenant in range(2 * case.get("tenants", 0)):
        prompt = [7_000_000 + tenant // 2 * 1024 + each for each in range(len(SYSTEM_PROMPT))]
        scheduler.add_request(new_request(f"tenant-{tenant}", [*prompt, *range(tenant, tenant + 64)], 1))
        while scheduler.requests:
            step(scheduler)
    shared = SYSTEM_PROMPT if case["shared"] else []
    endless = not case.get("turnover")
    for index in range(running - endless):
        own = [index * 64 + each for each in range(64)]
        scheduler.add_request(new_request(f"run-{index}", shared + own, OUTPUT_TOKENS))
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        step(scheduler)
    if endless:
        scheduler.add_request(new_request("endless", [9_000_000 + each for each in range(120_000)], 8))
        step(scheduler)
    for index in range(waiting):
        scheduler.add_request(waiting_request(f"wait-{index}", index, shared=case["shared"]))


def turn_over(scheduler: Any, index: int) -> None:
    """The longest running one ends, another one arrives."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests([scheduler.running[0].request_id], RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(waiting_request(f"more-{index}", 1000 + index, shared=True))


def measure(case: dict[str, Any], model: str, options: argparse.Namespace) -> dict[str, float | None]:
    """Microseconds of schedule() of both classes over the same steps; `added` is None where steps differ."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from tuner.scheduler import LiveScheduler, ReuseBudgetScheduler

    init_none_hash(sha256)
    stock_ns: list[tuple[int, int]] = []
    plugin_ns: list[tuple[int, int]] = []
    for repeat in range(options.repeats):
        common = {"running": options.running, "slots": case["slots"], "blocks": options.blocks}
        stock = build(AsyncScheduler, model, budget={}, **common)
        cls = LiveScheduler if case.get("live") else ReuseBudgetScheduler
        plugin = build(cls, model, budget=case["budget"], **common)
        for scheduler in (stock, plugin):
            fill(scheduler, case, running=options.running, waiting=options.waiting)
        gc.collect()
        gc.freeze()
        gc.disable()
        for index in range(options.steps + 1):
            order = ((stock, stock_ns), (plugin, plugin_ns))
            for scheduler, taken in order if (index + repeat) % 2 else order[::-1]:
                if case.get("turnover"):
                    turn_over(scheduler, index)
                times = step(scheduler)
                if index:
                    taken.append(times)
        gc.enable()
        gc.unfreeze()
        assert len(stock.waiting) == len(plugin.waiting) == options.waiting, "as many were to wait as before"
    added = [(mine - theirs) / 1e3 for (mine, _), (theirs, _) in zip(plugin_ns, stock_ns, strict=True)]
    same = not case.get("turnover")
    own = [(taken - inside) / 1e3 for taken, inside in plugin_ns]
    own_of_stock = [(taken - inside) / 1e3 for taken, inside in stock_ns]
    return {
        "stock_median_us": statistics.median(taken for taken, _ in stock_ns) / 1e3,
        "plugin_median_us": statistics.median(taken for taken, _ in plugin_ns) / 1e3,
        "added_mean_us": statistics.fmean(added) if same else None,
        "added_ci95_us": 1.96 * statistics.stdev(added) / len(added) ** 0.5 if same else None,
        "own_mean_us": statistics.fmean(own) - statistics.fmean(own_of_stock),
        "own_p95_us": sorted(own)[int(len(own) * 0.95)],
        "work_mean_us": _work(own, options.steps) - _work(own_of_stock, options.steps),
        "steps": float(len(added)),
    }


def _work(us: list[float], steps: int) -> float:
    """The mean over the steps of each step's median over the repeats, which follow each other in `us`."""
    return statistics.fmean(statistics.median(us[index::steps]) for index in range(steps))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=50, help="timed steps a repeat")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--vllm", help="the vllm command whose Python to use")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        argv = [vllm_python(options.vllm), __file__, "--inside", *sys.argv[1:]]
        return subprocess.run(argv, env=environment, check=False, timeout=1800).returncode
    from tuner.scheduler.folder import make_folder
    from tuner.scheduler.messages import FOLDER_VARIABLE
    from tuner.sim.tiny_model import make_tiny_model

    logging.disable(logging.WARNING)
    watch_vllm()
    results = {}
    shown = sys.stderr if options.json else sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = str(make_folder(Path(folder) / "live"))
        model = str(make_tiny_model(Path(folder) / "model"))
        head = f"schedule() with {options.running} running, {options.waiting} waiting, {options.blocks} blocks, in us"
        print(head, file=shown)
        columns = f"{'case':10} {'stock p50':>10} {'plug-in p50':>12} {'added mean':>18}"
        print(f"{columns} {'work':>7} {'own mean':>9} {'own p95':>9}", file=shown)
        for name in options.case or CASES:
            result = results[name] = measure(CASES[name], model, options)
            mean_us = result["added_mean_us"]
            added = "-" if mean_us is None else f"{mean_us:.1f} +- {result['added_ci95_us']:.1f}"
            print(
                f"{name:10} {result['stock_median_us']:10.1f} {result['plugin_median_us']:12.1f} {added:>18} "
                f"{result['work_mean_us']:7.1f} {result['own_mean_us']:9.1f} {result['own_p95_us']:9.1f}",
                file=shown,
                flush=True,
            )
    counted = [
        result["work_mean_us" if result["added_mean_us"] is None else "added_mean_us"] for result in results.values()
    ]
    worst = max(us for us in counted if us is not None)
    verdict = "ok" if worst < LIMIT_US else "TOO SLOW"
    print(f"most added: {worst:.1f} us a call (limit {LIMIT_US:.0f}): {verdict}", file=shown)
    if options.json:
        print(json.dumps({"cases": results, "most_added_us": worst, "limit_us": LIMIT_US}, indent=2))
    return 0 if worst < LIMIT_US else 1


if __name__ == "__main__":
    sys.exit(main())
