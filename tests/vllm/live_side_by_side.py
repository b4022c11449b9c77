"""One live scheduler of vLLM's, switched while idle, against fresh ones, step by step. Runs in vLLM's Python.

    python live_side_by_side.py MODEL_DIR KIND SETTINGS     prints one JSON object: {"differs": ..., "steps": n, ...}

KIND is `async` or `sync` (what vLLM would have chosen), or `window` (async, with a second KV cache group that has a
sliding window). For each of SETTINGS random settings the live scheduler gets a command and a probe request, and then
the same requests, cancellations and tokens as a scheduler that was built with these options; after every step the
tokens scheduled for each request, the prefixes found, the free blocks, the waiting and the preempted have to be equal,
and at the end the counts of the report those of the steps.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import fields
from pathlib import Path
from typing import Any

import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tuner.scheduler import LiveScheduler, ReuseBudgetScheduler, decisions, plugin
from tuner.scheduler.folder import make_folder, read_report, write_command
from tuner.scheduler.handles import supports_budget
from tuner.scheduler.messages import FOLDER_VARIABLE, Command

BLOCK = 16
LENGTH = 700
SLOTS = 16
BOOT_CHUNK = 1024
STEP_S = 0.05


class Clock:
    """Stands in for the monotonic clock of the schedulers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        time.monotonic = lambda: self.now_s  # type: ignore[assignment]


def build(cls: type, model: str, blocks: int, kind: str, values: dict[str, Any]) -> Any:
    """A scheduler without an engine around it, started with these values."""
    import torch

    budget = values.get("reuse_budget") or {}
    scheduler = {name: value for name, value in values.items() if name != "reuse_budget"}
    config = VllmConfig(
        model_config=ModelConfig(model=model, tokenizer=model, dtype="float32", seed=0, max_model_len=LENGTH),
        scheduler_config=SchedulerConfig(
            **{"max_num_batched_tokens": BOOT_CHUNK, **scheduler},
            max_num_seqs=SLOTS,
            max_model_len=LENGTH,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=True),
        additional_config={"chunktune": budget} if budget else {},
    )
    config.scheduler_config.async_scheduling = kind != "sync"
    config.cache_config.num_gpu_blocks = blocks
    sizes: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**sizes))]
    if kind == "window":
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**sizes, sliding_window=96)))
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def draw_values(rng: random.Random, kind: str) -> dict[str, Any]:
    """A setting that vLLM would start with."""
    chunked = rng.random() < 0.85
    threshold = rng.choice([0, 0, 32, 48, 100])
    values: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([16, 32, 64, 100, 128, 300, 512, 1024]) if chunked else 704,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": threshold > 0 and rng.random() < 0.5,
        "enable_chunked_prefill": chunked,
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "watermark": rng.choice([0.0, 0.0, 0.05, 0.13]),
        "max_num_active_seqs": rng.choice([SLOTS, SLOTS, 3, 8]),
    }
    if kind != "window" and rng.random() < 0.6:
        values["reuse_budget"] = {
            "max_cached_blocks": rng.choice([0, 8, 40, 400]),
            "min_reuse_ratio": rng.choice([0.0, 0.3, 0.8]),
            "max_hold_ms": rng.choice([100.0, 1000.0]),
            "yield_chunk_tokens": rng.choice([0, 16, 64]),
            "merge_below": rng.choice([0.0, 0.6]),
            "evict_above": rng.choice([0.0, 0.4]),
        }
    return values


SYSTEM_PROMPTS = [[random.Random(size).randrange(3, 800) for _ in range(size)] for size in (70, 150, 250)]
"""The same under every setting: what the last load left in the cache would be found."""


class Load:
    """Requests and cancellations by the step at which they come, drawn from a seed."""

    def __init__(self, rng: random.Random, prefix: str) -> None:
        self.arrivals: dict[int, list[tuple[str, list[int], int]]] = {}
        self.cancels: dict[int, list[str]] = {}
        at = 0
        for number in range(40):
            prompt = [*rng.choice([[], *SYSTEM_PROMPTS]), *(rng.randrange(3, 800) for _ in range(rng.randint(1, 350)))]
            name = f"{prefix}-{number}"
            self.arrivals.setdefault(at, []).append((name, prompt, rng.randint(1, 30)))
            if rng.random() < 0.06:
                self.cancels.setdefault(at + rng.randint(0, 12), []).append(name)
            at += rng.choice([0, 0, 1, 2, 6])


HASHER = get_request_block_hasher(BLOCK, sha256)


def request(name: str, prompt: list[int], tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), None, block_hasher=HASHER)


class Driver:
    """A scheduler and the steps that it has under way."""

    def __init__(self, scheduler: Any, depth: int) -> None:
        self.scheduler = scheduler
        self._depth = depth
        self._under_way: deque[Any] = deque()

    def step(self) -> dict[str, Any]:
        """Plan a step, end the oldest one; what was planned, in a form to compare."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        planned = {
            "shares": dict(output.num_scheduled_tokens),
            "found": {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs},
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "waiting": [each.request_id for each in scheduler.waiting],
            "preempted": sorted(output.preempted_req_ids or ()),
        }
        samples = {
            each
            for each in output.num_scheduled_tokens
            if each in scheduler.requests and not scheduler.requests[each].is_prefill_chunk
        }
        self._under_way.append((output, samples))
        if len(self._under_way) >= self._depth or not output.num_scheduled_tokens:
            self._end(*self._under_way.popleft())
        return planned

    def idle(self) -> bool:
        return not self.scheduler.requests and all(not output.num_scheduled_tokens for output, _ in self._under_way)

    def _end(self, output: Any, samples: set[str]) -> None:
        ids = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={each: index for index, each in enumerate(ids)},
                sampled_token_ids=[[7 + len(each) % 5] if each in samples else [] for each in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )


def run_out(driver: Driver) -> None:
    for _ in range(2000):
        if driver.idle():
            return
        driver.step()
    raise AssertionError("no end")


def switch(driver: Driver, folder: Path, nonce: str, values: dict[str, Any]) -> str:
    """Command and probe request; '' or what is wrong with the answer."""
    write_command(folder, Command(nonce, "apply", values, 1e4))
    driver.scheduler.add_request(request(f"probe-{nonce}", [1], 1))
    run_out(driver)
    report = read_report(folder, 0)
    if report is None or (report.nonce, report.state) != (nonce, "applied"):
        return f"answered {report}"
    wanted = {**report.boot, **values}
    budget = {**report.boot.get("reuse_budget", {}), **values.get("reuse_budget", {})}
    applied = dict(report.applied)
    same = applied.pop("reuse_budget", {}) == budget
    wanted.pop("reuse_budget", None)
    return "" if same and applied == wanted else f"asked for {values}, runs {report.applied}"


def compare(live: Driver, fresh: Driver, load: Load, clock: Clock) -> tuple[str, dict[str, float]]:
    """The first difference between the two under this load or '', and the counts of what was planned."""
    counts = {"steps": 0.0, "tokens": 0.0, "largest_step_tokens": 0.0, "preemptions": 0.0}
    for turn in range(5000):
        clock.now_s += STEP_S
        for driver in (live, fresh):
            for name, prompt, tokens in load.arrivals.get(turn, []):
                driver.scheduler.add_request(request(name, list(prompt), tokens))
            for name in load.cancels.get(turn, []):
                driver.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if live.idle() and fresh.idle() and turn > max(load.arrivals):
            return "", counts
        mine, theirs = live.step(), fresh.step()
        if mine != theirs:
            return f"step {turn}: live {mine}, fresh {theirs}", counts
        tokens = sum(mine["shares"].values())
        counts["steps"] += tokens > 0
        counts["tokens"] += tokens
        counts["largest_step_tokens"] = max(counts["largest_step_tokens"], tokens)
        counts["preemptions"] += len(mine["preempted"])
    return "no end", counts


def counted(live: Driver, folder: Path, nonce: str, counts: dict[str, float], load: Load) -> str:
    """'' or how the report's counters differ from what was planned."""
    write_command(folder, Command(nonce, "report"))
    live.scheduler.add_request(request(f"ask-{nonce}", [1], 1))
    report = read_report(folder, 0)
    run_out(live)
    if report is None or report.state != "report":
        return f"answered {report}"
    said = {name: report.counters[name] for name in counts}
    if said != counts:
        return f"counted {said}, planned {counts}"
    asked = sum(map(len, load.arrivals.values()))
    sound = (
        0 < report.counters["prefills"] <= asked and report.counters["prefills"] <= report.counters["prefill_chunks"]
    )
    return "" if sound and 0 < report.counters["kv_usage_peak"] <= 1 else f"counters {dict(report.counters)}"


def main() -> int:
    model, kind, settings = sys.argv[1], sys.argv[2], int(sys.argv[3])
    init_none_hash(sha256)
    # So that some of the prompts are long ones too.
    plugin.LONG_PROMPT_TOKENS = 250
    decisions.LONG_PROMPT_CHUNK = plugin.LONG_PROMPT_CHUNK = 96
    clock = Clock()
    rng = random.Random(kind)
    blocks = LENGTH // BLOCK * 2 + 20
    depth = 1 if kind == "sync" else 2
    known = {each.name for each in fields(SchedulerConfig)}
    if not supports_budget(vllm.__version__):
        known.add("reuse_budget")
    result: dict[str, Any] = {"differs": "", "steps": 0, "settings": 0, "policies": 0, "preemptions": 0}
    with tempfile.TemporaryDirectory() as parent:
        folder = make_folder(Path(parent) / "live")
        os.environ[FOLDER_VARIABLE] = str(folder)
        live = Driver(build(LiveScheduler, model, blocks, kind, {}), depth)
        for number in range(settings):
            values = {name: value for name, value in draw_values(rng, kind).items() if name in known}
            load = Load(rng, f"s{number}")
            stock = Scheduler if kind == "sync" else AsyncScheduler
            budget = values.get("reuse_budget")
            fresh = Driver(build(ReuseBudgetScheduler if budget else stock, model, blocks, kind, values), depth)
            wrong = switch(live, folder, f"n{number}", values)
            counts: dict[str, float] = {}
            if not wrong:
                wrong, counts = compare(live, fresh, load, clock)
            wrong = wrong or counted(live, folder, f"r{number}", counts, load)
            if wrong:
                result["differs"] = f"setting {number} {values}: {wrong}"
                break
            result["settings"] += 1
            result["steps"] += int(counts["steps"])
            result["policies"] += bool(budget)
            result["preemptions"] += int(counts["preemptions"])
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
