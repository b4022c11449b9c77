"""What happens before the first request: defaults, vLLM's rules, the memory plan, and the lines vLLM logs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import UsageError
from tuner.scheduler.decisions import Budget
from tuner.scheduler.messages import LIVE_CLASS, started_budget
from tuner.sim.core import SchedulerConfig
from tuner.sim.pipeline import Timing
from tuner.sim.tables import MemoryPlan, cost_model_name, max_position_embeddings, plan_memory

GIB = 1 << 30
PLUGIN = "tuner.scheduler.ReuseBudgetScheduler"
MORE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


@dataclass(frozen=True)
class Hardware:
    """What the engine pretends to run on: the environment variable CHUNKTUNE_SIM, as JSON."""

    gpu: str = "h100_sxm"
    count: int | None = None
    """GPUs there are; None: as many as the options ask for."""
    cost_model: str | None = None
    noise: float = 0.0
    seed: int = 0
    speed: float = 1.0
    """2 runs everything, and so every latency, in half the time."""
    step_time_scale: float = 1.0
    step_overhead_ms: float = 0.0
    """What the server itself needs between two steps; it shows only without async scheduling. 0 by default: it
    belongs to the host's processor, about which the tables say nothing."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Hardware:
        """UsageError when the variable is no JSON object or names something unknown."""
        text = environment.get("CHUNKTUNE_SIM") or "{}"
        try:
            settings = json.loads(text)
            hardware = cls(**settings)
        except (json.JSONDecodeError, TypeError) as error:
            raise UsageError(f"CHUNKTUNE_SIM does not describe a machine: {error}") from None
        if hardware.speed <= 0 or hardware.step_time_scale <= 0 or min(hardware.noise, hardware.step_overhead_ms) < 0:
            raise UsageError("CHUNKTUNE_SIM: speed and step_time_scale are above 0, nothing else is below it")
        return hardware


class StartError(Exception):
    """The engine does not start: vLLM's text."""


class ConfigError(StartError):
    """The options contradict each other, found before an engine process exists."""


@dataclass(frozen=True)
class Plan:
    """Everything decided at the start."""

    model: str
    served_names: tuple[str, ...]
    scheduler: SchedulerConfig
    timing: Timing
    memory: MemoryPlan
    cost_model: str
    gpu: str
    tp: int
    utilization: float
    budget: Budget | None
    """The reuse budget, when the scheduler plug-in is asked for."""
    stock_chunk: int
    """The chunk size that is taken when none is asked for."""

    @property
    def kv_tokens(self) -> int:
        return self.scheduler.num_blocks * self.scheduler.block_size

    @property
    def max_concurrency(self) -> float:
        block = self.scheduler.block_size
        return self.scheduler.num_blocks / -(-self.scheduler.max_model_len // block)

    def config_lines(self) -> list[str]:
        """Logged by the API server, before there is an engine."""
        lines = [f"Using max model len {self.scheduler.max_model_len}"]
        if self.scheduler.enable_chunked_prefill:
            chunk = self.scheduler.max_num_batched_tokens
            lines.append(f"Chunked prefill is enabled with max_num_batched_tokens={chunk}.")
        return lines

    def engine_lines(self) -> list[str]:
        """Logged by the engine."""
        memory, length = self.memory, self.scheduler.max_model_len
        return [
            f"Initializing a V1 LLM engine (v0.32.0, simulated) with config: model='{self.model}', "
            f"tensor_parallel_size={self.tp}, pretended hardware: {self.tp} x {self.gpu}, "
            f"step times of {self.cost_model}",
            f"Model loading took {memory.weights_bytes / GIB:.2f} GiB memory and 0.000000 seconds",
            f"Actual usage is {memory.weights_bytes / GIB:.2f} GiB for consumed memory (weights + non-torch), "
            f"{memory.activation_bytes / GIB:.2f} GiB for peak activation, and 0.0 GiB for CUDAGraph memory.",
            f"Available KV cache memory: {self.kv_bytes / GIB:.2f} GiB",
            f"GPU KV cache size: {self.kv_tokens:,} tokens, Maximum concurrency for {length:,} tokens per request: "
            f"{self.max_concurrency:.2f}x",
        ]

    @property
    def kv_bytes(self) -> int:
        """The KV pool of one GPU."""
        return self.kv_tokens * self.memory.kv_bytes_per_token


def make_plan(options: argparse.Namespace, hardware: Hardware) -> Plan:
    """Decide everything. ConfigError and StartError carry vLLM's texts; UsageError says what the tables lack."""
    tp = options.tensor_parallel_size
    if hardware.count is not None and tp > hardware.count:
        raise ConfigError(
            f"World size ({tp}) is larger than the number of available GPUs ({hardware.count}) in this node. "
            "If this is intentional and you are using:\n- ray, set '--distributed-executor-backend ray'.\n"
            "- multiprocessing, set '--nnodes' appropriately."
        )
    cost_model = cost_model_name(hardware.cost_model or options.model)
    derived = max_position_embeddings(cost_model)
    length = options.max_model_len or derived
    if length > derived:
        raise ConfigError(
            f"User-specified max_model_len ({length}) is greater than the derived max_model_len "
            f"(max_position_embeddings={float(derived)} or model_max_length=None in model's config.json)."
        )
    scheduler_options = _scheduler_options(options, hardware.gpu, length)
    chunk, seqs = scheduler_options["max_num_batched_tokens"], scheduler_options["max_num_seqs"]
    memory = plan_memory(
        cost_model, hardware.gpu, tp, chunk=chunk, max_num_seqs=seqs, utilization=options.gpu_memory_utilization
    )
    blocks = _blocks(options, memory, length)
    return Plan(
        model=options.model,
        served_names=tuple(options.served_model_name or [options.model]),
        scheduler=SchedulerConfig(**scheduler_options, num_blocks=blocks),
        timing=Timing(
            depth=2 if options.async_scheduling else 1,
            step_overhead_ms=hardware.step_overhead_ms / hardware.speed,
            scale=hardware.step_time_scale / hardware.speed,
            noise=hardware.noise,
            seed=hardware.seed,
        ),
        memory=memory,
        cost_model=cost_model,
        gpu=hardware.gpu,
        tp=tp,
        utilization=options.gpu_memory_utilization,
        budget=_budget(options),
        stock_chunk=_stock_chunk(hardware.gpu, length, chunked=options.enable_chunked_prefill),
    )


def _is_big(gpu: str) -> bool:
    return not gpu.startswith(("a100", "l40", "a10", "l4"))


def _stock_chunk(gpu: str, length: int, *, chunked: bool) -> int:
    chunk = 8192 if _is_big(gpu) else 2048
    return chunk if chunked else max(chunk, length)


def _scheduler_options(options: argparse.Namespace, gpu: str, length: int) -> dict[str, Any]:
    chunk = options.max_num_batched_tokens
    if chunk is None:
        chunk = _stock_chunk(gpu, length, chunked=options.enable_chunked_prefill)
    seqs = options.max_num_seqs
    if seqs is None:
        seqs = min(1024 if _is_big(gpu) else 256, chunk)
    if chunk < length and not options.enable_chunked_prefill:
        raise ConfigError(
            f"max_num_batched_tokens ({chunk}) is smaller than max_model_len ({length}). This effectively limits "
            "the maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please "
            "increase max_num_batched_tokens or decrease max_model_len."
        )
    if chunk < seqs:
        raise ConfigError(f"max_num_batched_tokens ({chunk}) must be greater than or equal to max_num_seqs ({seqs}).")
    threshold = options.long_prefill_token_threshold
    if threshold > length:
        raise ConfigError(
            f"long_prefill_token_threshold ({threshold}) cannot be greater than the max_model_len ({length})."
        )
    if options.max_num_active_seqs is not None and options.max_num_active_seqs > seqs:
        raise ConfigError(
            f"max_num_active_seqs ({options.max_num_active_seqs}) cannot be greater than max_num_seqs ({seqs})."
        )
    return {
        "max_num_batched_tokens": chunk,
        "max_num_seqs": seqs,
        "max_model_len": length,
        "block_size": options.block_size,
        "enable_chunked_prefill": options.enable_chunked_prefill,
        "enable_prefix_caching": options.enable_prefix_caching,
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": options.long_prefill_token_threshold_adaptive,
        "max_num_scheduled_tokens": options.max_num_scheduled_tokens,
        "max_num_active_seqs": options.max_num_active_seqs,
        "watermark": options.watermark,
        "scheduler_reserve_full_isl": options.scheduler_reserve_full_isl,
    }


def _blocks(options: argparse.Namespace, memory: MemoryPlan, length: int) -> int:
    block_bytes = options.block_size * memory.kv_bytes_per_token
    if options.kv_cache_memory_bytes is not None:
        available = options.kv_cache_memory_bytes
    else:
        available = memory.kv_bytes
    blocks = options.num_gpu_blocks_override
    if blocks is None:
        if available <= 0:
            raise StartError(
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, "
                f"despite its name). {MORE}"
            )
        blocks = available // block_bytes
    needed = -(-length // options.block_size)
    if needed > blocks - 1:
        longest = max(blocks - 1, 0) * options.block_size
        hint = f"Based on the available memory, the estimated maximum model length is {longest}. " if longest else ""
        raise StartError(
            f"To serve at least one request with the model's max seq len ({length}), "
            f"({needed * block_bytes / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache "
            f"memory ({blocks * block_bytes / GIB:.2f} GiB). {hint}Try increasing `gpu_memory_utilization` (which "
            "also controls CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the "
            f"engine. {MORE}"
        )
    return int(blocks)


def _budget(options: argparse.Namespace) -> Budget | None:
    name = options.scheduler_cls
    if name is None or name.startswith("vllm."):
        return None
    if name not in (PLUGIN, LIVE_CLASS):
        raise ConfigError(f"The simulated engine has no scheduler class {name!r}; it has {PLUGIN} and {LIVE_CLASS}.")
    try:
        return started_budget(options.additional_config, os.environ)
    except ValueError as error:
        raise StartError(f"chunktune: {error}") from None


def dev_mode() -> bool:
    """vLLM's own switch for the development endpoints."""
    return os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1"
