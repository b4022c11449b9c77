"""What the simulated engine says at `/metrics`."""

from __future__ import annotations

from dataclasses import asdict

from tuner.sim.live import LiveEngine
from tuner.sim.policy import BudgetPolicy
from tuner.sim.prom import Page


def metrics_text(engine: LiveEngine, model_name: str, created_s: float) -> str:
    """The page, as Prometheus text."""
    plan, core, latencies = engine.plan, engine.core, engine.latencies
    totals, pool = core.totals, core.pool
    page = Page({"engine": "0", "model_name": model_name}, created_s)
    page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", len(core.running))
    page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", len(core.waiting))
    page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", pool.usage)
    page.counter(
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        totals.prefix_queries,
    )
    page.counter(
        "vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", totals.prefix_hits
    )
    page.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", totals.preemptions)
    page.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", totals.prompt_tokens)
    page.counter(
        "vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", totals.cached_tokens
    )
    page.counter("vllm:generation_tokens", "Number of generation tokens processed.", totals.generated_tokens)
    page.counter(
        "vllm:request_success",
        "Count of successfully processed requests.",
        0,
        by="finished_reason",
        values={reason: float(count) for reason, count in engine.finished.items()},
    )
    for name, text, histogram in (
        ("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", latencies.step_tokens),
        ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", latencies.first_token),
        ("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", latencies.between_tokens),
        ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", latencies.whole),
        ("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", latencies.queued),
        ("vllm:request_prompt_tokens", "Number of prefill tokens processed.", latencies.prompt),
        ("vllm:request_generation_tokens", "Number of generation tokens processed.", latencies.output),
    ):
        page.histogram(name, text, histogram)
    page.counter("chunktune:prefill_chunks", "Shares of steps that computed a part of a prompt.", totals.prefill_chunks)
    page.counter("chunktune:prefills", "Prompts computed to their end.", totals.prefills)
    if isinstance(core.policy, BudgetPolicy):
        for name, value in asdict(core.policy.counters).items():
            if name == "protected_blocks":
                page.gauge(f"chunktune:{name}", "Reuse budget: blocks kept now.", value)
            else:
                page.counter(f"chunktune:{name}", f"Reuse budget: {name.replace('_', ' ')}.", value)
    scheduler = plan.scheduler
    page.gauge(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig",
        1,
        block_size=str(scheduler.block_size),
        cache_dtype="auto",
        enable_prefix_caching=str(scheduler.enable_prefix_caching),
        gpu_memory_utilization=str(plan.utilization),
        kv_cache_size_tokens=str(plan.kv_tokens),
        kv_cache_max_concurrency=str(plan.max_concurrency),
        num_gpu_blocks=str(scheduler.num_blocks),
    )
    return page.text()
