"""How long one engine step takes, and how memory divides, from aiconfigurator-core's measured tables."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import UsageError

BACKEND = "vllm"


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes: chunks of prompts, and sequences that decode one token each."""

    prefills: tuple[tuple[int, int], ...]
    """(new tokens, tokens computed before) of each prompt chunk."""
    decodes: tuple[int, ...]
    """Context length of each decoding sequence."""

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.prefills) + len(self.decodes)


class StepCost(Protocol):
    """Time of one step on the pretended hardware."""

    def step_ms(self, shape: StepShape) -> float:
        """Milliseconds; 0 for an empty step."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A made-up cost for tests and for machines without the tables: a floor, and a price per token."""

    floor_ms: float = 10.0
    per_token_ms: float = 0.05

    def step_ms(self, shape: StepShape) -> float:
        return self.floor_ms + self.per_token_ms * shape.tokens if shape.tokens else 0.0


class MeasuredCost:
    """Step times from the tables for one model, GPU and tensor parallelism.

    Everything that is not attention costs what a batch of that many tokens costs. Prompt attention is one
    kernel over the step's chunks: the tables know equal chunks, so the time of equal chunks of the mean size
    is scaled by the true number of query-key pairs. Decode attention goes by the mean context, which is exact
    for a kernel that is bound by reading the cache.
    """

    def __init__(self, cost_model: str, gpu: str, tp: int) -> None:
        """UsageError when the tables are not installed or do not know the model, GPU or parallelism."""
        self._handle = _compiled(cost_model, gpu, tp)
        self._cache: dict[StepShape, float] = {}
        # The tables are read at the first question; asked here, so that no request waits for that.
        self.step_ms(StepShape(((64, 0), (64, 64)), (128, 128)))
        self.step_ms(StepShape((), (128,)))

    def step_ms(self, shape: StepShape) -> float:
        if not shape.tokens:
            return 0.0
        known = self._cache.get(shape)
        if known is None:
            if len(self._cache) > 100_000:
                self._cache.clear()
            known = self._cache[shape] = self._estimate(shape)
        return known

    def _estimate(self, shape: StepShape) -> float:
        new = sum(n for n, _ in shape.prefills)
        count = len(shape.decodes)
        context = max(1, round(sum(shape.decodes) / count)) if count else 1
        if not new:
            return float(self._handle.decode_step_latency(count, context, 1))
        _, shared, prompt_attention, decode_attention = self._handle.mixed_step_breakdown(new, count, new, 1, 0)
        if count:
            decode_attention = self._handle.mixed_step_breakdown(1, count, context, 1, 0)[3]
        if any(done for _, done in shape.prefills) or len(shape.prefills) > 1:
            prompt_attention = self._prompt_attention_ms(shape.prefills)
        return float(shared + prompt_attention + decode_attention)

    def _prompt_attention_ms(self, prefills: Sequence[tuple[int, int]]) -> float:
        k = len(prefills)
        mean_new = max(1, round(sum(n for n, _ in prefills) / k))
        mean_done = round(sum(done for _, done in prefills) / k)
        equal = self._handle.run_static_per_op(
            batch_size=k, isl=mean_new + mean_done, osl=1, prefix=mean_done, mode="static_ctx"
        )[0]
        attention = sum(ms for name, ms, *_ in equal if "attention" in name)
        pairs = sum(n * (done + (n + 1) / 2) for n, done in prefills)
        equal_pairs = k * mean_new * (mean_done + (mean_new + 1) / 2)
        return float(attention * pairs / equal_pairs)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one GPU (a rank), and the tokens that the whole engine's KV cache holds."""

    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    """Peak of a step at the largest batch, graphs and communication buffers included."""
    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int


def plan_memory(cost_model: str, gpu: str, tp: int, *, chunk: int, max_num_seqs: int, utilization: float) -> MemoryPlan:
    """How `gpu_memory_utilization` of a GPU divides at this chunk size; UsageError as for `MeasuredCost`.

    `kv_bytes` and `kv_tokens` are 0 or negative where nothing is left for the KV cache.
    """
    try:
        part = _memory_parts(cost_model, gpu, tp, chunk, max_num_seqs)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unknown(cost_model, gpu, tp, error) from None
    total = int(part["gpu_memory_capacity_bytes"])
    weights = int(part["weights_bytes"])
    activation = int(part["non_kv_bytes"]) - weights
    per_token = int(part["kv_size_per_token_bytes"])
    kv = int(total * utilization) - weights - activation
    return MemoryPlan(
        total_bytes=total,
        weights_bytes=weights,
        activation_bytes=activation,
        kv_bytes=kv,
        kv_bytes_per_token=per_token,
        kv_tokens=int(part["tokens_from_kv_bytes"](kv)) if kv > 0 else 0,
    )


def known_models() -> list[str]:
    """Names under which the tables know models."""
    return sorted(str(name) for name in _tables("aiconfigurator_core.sdk.common").DefaultHFModels)


def cost_model_name(model: str) -> str:
    """The tables' name for a served model; the name itself where nothing is nearer.

    Fine-tunes cost what their base model costs: `meta-llama/Llama-3.1-70B-Instruct` reads
    `meta-llama/Meta-Llama-3.1-70B`.
    """
    known = {name.casefold(): name for name in known_models()}
    owner, _, bare = model.casefold().rpartition("/")
    stems = [bare]
    for suffix in ("-instruct", "-chat", "-it"):
        stems.extend(stem.removesuffix(suffix) for stem in list(stems))
    for stem in stems:
        for candidate in (f"{owner}/{stem}", f"{owner}/meta-{stem}"):
            if candidate in known:
                return known[candidate]
    return model


def max_position_embeddings(cost_model: str) -> int:
    """The longest sequence of the model's own configuration; UsageError when the tables do not know the model."""
    _refuse_unknown_model(cost_model)
    utils = _tables("aiconfigurator_core.sdk.utils")
    local = Path(cost_model).is_dir()
    config = (utils._load_local_config if local else utils._load_pre_downloaded_hf_config)(cost_model)
    return int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])


def _tables(module: str) -> Any:
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the simulated engine needs aiconfigurator-core for its step times, and it does not import ({error})",
            "Install it: pip install 'chunktune[sim]'",
        ) from None


@lru_cache(maxsize=8)
def _compiled(cost_model: str, gpu: str, tp: int) -> Any:
    _refuse_unknown_model(cost_model)
    engine = _tables("aiconfigurator_core.sdk.engine")
    try:
        return engine.EngineHandle.compile(cost_model, gpu, BACKEND, tp_size=tp)
    except Exception as error:  # the package raises its own, undocumented kinds
        raise _unknown(cost_model, gpu, tp, error) from None


@lru_cache(maxsize=64)
def _memory_parts(cost_model: str, gpu: str, tp: int, chunk: int, max_num_seqs: int) -> dict[str, Any]:
    _refuse_unknown_model(cost_model)
    memory = _tables("aiconfigurator_core.sdk.memory")
    database = _tables("aiconfigurator_core.sdk.perf_database")
    version = database.resolve_query_version(gpu, BACKEND, "current")
    estimator = memory.KVCacheEstimator.from_request(
        cost_model, gpu, BACKEND, version, max_num_tokens=chunk, max_batch_size=max_num_seqs, tp_size=tp
    )
    return dict(estimator.breakdown)


def _refuse_unknown_model(cost_model: str) -> None:
    """The package would otherwise look for the name on the network."""
    known = known_models()
    if cost_model in known or Path(cost_model).is_dir():
        return
    near = difflib.get_close_matches(cost_model, known, n=1, cutoff=0.6)
    raise UsageError(
        f"aiconfigurator-core knows no model {cost_model!r}" + (f"; the nearest is {near[0]!r}" if near else ""),
        "Set hardware.cost_model to a name that the package knows.",
    )


def _unknown(cost_model: str, gpu: str, tp: int, error: Exception) -> UsageError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(
        f"aiconfigurator-core has no {BACKEND} tables for {cost_model} on {tp} x {gpu}: {reason}",
        "Set hardware.cost_model (a name the package knows), hardware.gpu (a system name such as h100_sxm) "
        "and tensor_parallel_size.",
    )
