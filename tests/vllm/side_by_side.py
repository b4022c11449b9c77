"""vLLM's scheduler and the simulated engine's, step by step on the same requests. Runs in vLLM's Python.

    python side_by_side.py MODEL_DIR SCENARIO...      prints one JSON object: {scenario: null or the first difference}

A scenario is `seed` or `seed:plugin`. Both get the same arrivals, cancellations and tokens; after every step the
tokens scheduled for each request, the prefixes found, the free blocks and the preemptions have to be equal, and at the
end the plug-in may hold on to none of the requests. `grammar` is a request that waits for its grammar behind others
that are let through: it may wait for no longer than a hold.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as TheirRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tuner.scheduler import ReuseBudgetScheduler, decisions, plugin
from tuner.scheduler.decisions import Budget
from tuner.sim import policy
from tuner.sim.core import Core, Request, Step
from tuner.sim.core import SchedulerConfig as OurConfig
from tuner.sim.policy import BudgetPolicy

STEP_S = 0.05


class Scenario:
    """Options and arrivals, drawn from a seed."""

    def __init__(self, name: str) -> None:
        plugin = name.endswith(":plugin")
        rng = random.Random(name)
        self.block = rng.choice([16, 32])
        self.chunk = rng.choice([32, 64, 100, 128, 300, 512])
        self.slots = rng.choice([4, 16, 32])
        self.length = 700
        # From a pool that one sequence fills to one that never runs out.
        self.blocks = self.length // self.block + 2 + rng.choice([0, 5, 20, 100, 400])
        self.threshold = rng.choice([0, 0, 48, 64])
        self.adaptive = rng.random() < 0.3
        self.caching = bool(plugin) or rng.random() < 0.85
        self.watermark = rng.choice([0.0, 0.0, 0.05])
        self.whole = rng.random() < 0.8
        self.chunked = rng.random() < 0.85
        if not self.chunked:
            self.chunk = 704
        self.depth = 2 if plugin else rng.choice([1, 2])
        self.budget: dict[str, Any] = {}
        if plugin:
            self.budget = {
                "max_cached_blocks": rng.choice([0, 8, 40, 400]),
                "min_reuse_ratio": rng.choice([0.0, 0.3, 0.8]),
                "max_hold_ms": rng.choice([100.0, 1000.0]),
                "yield_chunk_tokens": rng.choice([0, 16, 64]),
                "merge_below": rng.choice([0.0, 0.6]),
                "evict_above": rng.choice([0.0, 0.4]),
            }
        systems = [[rng.randrange(3, 800) for _ in range(rng.randint(10, 250))] for _ in range(3)]
        self.arrivals: dict[int, list[tuple[str, list[int], int]]] = {}
        self.cancels: dict[int, list[str]] = {}
        at = 0
        for number in range(rng.choice([20, 60])):
            head = rng.choice([[], *systems])
            prompt = [*head, *(rng.randrange(3, 800) for _ in range(rng.randint(1, 350)))]
            self.arrivals.setdefault(at, []).append((f"r{number}", prompt, rng.randint(1, 30)))
            if rng.random() < 0.08:
                self.cancels.setdefault(at + rng.randint(0, 12), []).append(f"r{number}")
            at += rng.choice([0, 0, 1, 2, 6])

    def ours(self) -> Core:
        config = OurConfig(
            max_num_batched_tokens=self.chunk,
            max_num_seqs=self.slots,
            max_model_len=self.length,
            num_blocks=self.blocks,
            block_size=self.block,
            enable_prefix_caching=self.caching,
            enable_chunked_prefill=self.chunked,
            long_prefill_token_threshold=self.threshold,
            long_prefill_token_threshold_adaptive=self.adaptive and self.threshold > 0,
            watermark=self.watermark,
            scheduler_reserve_full_isl=self.whole,
        )
        return Core(config, BudgetPolicy(Budget(**self.budget), self.blocks) if self.budget else None)

    def theirs(self, model: str) -> Any:
        import torch

        config = VllmConfig(
            model_config=ModelConfig(model=model, tokenizer=model, dtype="float32", seed=0, max_model_len=self.length),
            scheduler_config=SchedulerConfig(
                max_num_seqs=self.slots,
                max_num_batched_tokens=max(self.chunk, self.slots),
                max_model_len=self.length,
                is_encoder_decoder=False,
                enable_chunked_prefill=self.chunked,
                long_prefill_token_threshold=self.threshold,
                long_prefill_token_threshold_adaptive=self.adaptive and self.threshold > 0,
                watermark=self.watermark,
                scheduler_reserve_full_isl=self.whole,
            ),
            cache_config=CacheConfig(
                block_size=self.block, gpu_memory_utilization=0.9, enable_prefix_caching=self.caching
            ),
            additional_config={"chunktune": self.budget} if self.budget else {},
        )
        config.cache_config.num_gpu_blocks = self.blocks
        spec = FullAttentionSpec(block_size=self.block, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        cls = ReuseBudgetScheduler if self.budget else AsyncScheduler if self.depth == 2 else Scheduler
        return cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.block,
            log_stats=True,
        )


def compare(name: str, model: str) -> str | None:
    """The first difference, or None when there is none to the end."""
    scenario = Scenario(name)
    core, scheduler = scenario.ours(), scenario.theirs(model)
    hasher = get_request_block_hasher(scenario.block, sha256)
    mine: dict[str, Request] = {}
    theirs: list[weakref.ref[TheirRequest]] = []
    under_way: deque[tuple[Step | None, Any]] = deque()
    for turn in range(5000):
        now_s = turn * STEP_S
        time.monotonic = lambda now_s=now_s: now_s  # type: ignore[assignment,misc]
        for each, prompt, tokens in scenario.arrivals.pop(turn, []):
            mine[each] = Request(each, list(prompt), tokens, now_s)
            core.add(mine[each])
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            request = TheirRequest(each, list(prompt), sampling, None, block_hasher=hasher)
            theirs.append(weakref.ref(request))
            scheduler.add_request(request)
            del request
        for each in scenario.cancels.pop(turn, []):
            if each in mine and mine[each].finished is None:
                core.abort(mine[each], now_s)
                scheduler.finish_requests(each, RequestStatus.FINISHED_ABORTED)
        if not core.unfinished and all(step is None for step, _ in under_way):
            if not scenario.arrivals:
                scheduler.schedule()
                gc.collect()
                held = [each for each in (ref() for ref in theirs) if each is not None]
                return f"holds {[each.request_id for each in held]}" if held else None
            continue
        step = core.plan(now_s)
        output = scheduler.schedule()
        where = f"step {turn}: "
        ours = {part.request.id: part.tokens for part in step.parts} if step else {}
        if ours != output.num_scheduled_tokens:
            return f"{where}scheduled {ours}, vLLM {dict(output.num_scheduled_tokens)}"
        found = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = {each: mine[each].cached_tokens for each in found if mine[each].preemptions == 0}
        if any(found[each] != tokens for each, tokens in cached.items()):
            return f"{where}found {cached}, vLLM {found}"
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if core.pool.free != free:
            return f"{where}{core.pool.free} blocks free, vLLM {free}"
        waiting = [request.request_id for request in scheduler.waiting]
        if [request.id for request in core.waiting] != waiting:
            return f"{where}waiting {[r.id for r in core.waiting]}, vLLM {waiting}"
        under_way.append((step, output))
        if len(under_way) == scenario.depth or step is None:
            step, output = under_way.popleft()
            tokens = {t.request.id: t.token for t in core.finish(step, now_s)} if step else {}
            ids = list(output.num_scheduled_tokens)
            sampled = [[tokens[each]] if each in tokens else [] for each in ids]
            if step:
                samples = {part.request.id for part in step.parts if part.samples}
                sampled = [row or ([7] if each in samples else []) for each, row in zip(ids, sampled, strict=True)]
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
    return "no end"


def grammar(model: str) -> str | None:
    """What is wrong, or None: a new preferred request comes in every step, and one gets in."""
    scenario = Scenario("0:plugin")
    scenario.slots, scenario.blocks, scenario.chunk = 1, 400, 512
    scenario.watermark, scenario.threshold, scenario.adaptive = 0.0, 0, False
    scenario.budget = {"max_cached_blocks": 40, "min_reuse_ratio": 0.5, "max_hold_ms": 1000.0}
    scheduler = scenario.theirs(model)
    hasher = get_request_block_hasher(scenario.block, sha256)

    def add(name: str, prompt: list[int]) -> TheirRequest:
        request = TheirRequest(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        scheduler.add_request(request)
        return request

    for turn in range(40):
        time.monotonic = lambda now_s=turn * 0.1: now_s  # type: ignore[assignment,misc]
        add(f"shares-{turn}", [*range(3, 260), 300 + turn])
        add(f"shares-too-{turn}", [*range(3, 260), 400 + turn])
        if turn == 3:
            waits = add("grammar", list(range(500, 600)))
            waits.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            waits.structured_output_request = SimpleNamespace(grammar=object())  # type: ignore[assignment]
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        if "grammar" in ids:
            return None if turn > 3 else "was not overtaken"
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={each: index for index, each in enumerate(ids)},
                sampled_token_ids=[[7] for _ in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
    return f"still waits, {len(scheduler.waiting)} with it"


def main() -> int:
    model, *names = sys.argv[1:]
    init_none_hash(sha256)
    # So that the scenarios' prompts are long ones too.
    plugin.LONG_PROMPT_TOKENS = policy.LONG_PROMPT_TOKENS = 250
    decisions.LONG_PROMPT_CHUNK = plugin.LONG_PROMPT_CHUNK = policy.LONG_PROMPT_CHUNK = 96
    results = {}
    for name in names:
        try:
            results[name] = grammar(model) if name == "grammar" else compare(name, model)
        except Exception as error:
            import traceback

            results[name] = f"{type(error).__name__}: {error}; {traceback.format_exc()[-700:]}"
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
