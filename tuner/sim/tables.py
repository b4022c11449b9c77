"""The door to aiconfigurator-core: measured operator tables, asked through its Rust estimator.

Building a model's description takes a second of Python; the result is small, so it is kept on disk beside the
user's other caches, under the package's version. Standard library only besides that package.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import importlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tuner.errors import UsageError

BACKEND = "vllm"
PACKAGE = "aiconfigurator_core"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one GPU (a rank), and the tokens that the whole engine's KV cache holds."""

    total_bytes: int
    weights_bytes: int
    activation_bytes: int
    """Peak of a step at the largest batch, graphs and communication buffers included."""
    kv_bytes: int
    """Can be negative, when nothing is left."""
    kv_bytes_per_token: int
    kv_tokens: int


def known_models() -> list[str]:
    """Names under which the tables know models."""
    return sorted(_configs())


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
    config = json.loads(_config_path(cost_model).read_text())
    return int(config.get("max_position_embeddings") or config["text_config"]["max_position_embeddings"])


@lru_cache(maxsize=8)
def estimator(cost_model: str, gpu: str, tp: int) -> Any:
    """The Rust estimator (`AicEngine`); UsageError when the package is missing or does not know the three."""
    _config_path(cost_model)
    core = _package(PACKAGE)

    def build() -> str:
        handle = _package(f"{PACKAGE}.sdk.engine").EngineHandle.compile(cost_model, gpu, BACKEND, tp_size=tp)
        return base64.b64encode(handle.spec_bytes).decode()

    try:
        spec = base64.b64decode(_kept(cost_model, f"engine-{gpu}-{tp}", build))
        return core.AicEngine.from_spec(spec, None)
    except Exception as error:  # the package raises its own, undocumented kinds
        raise _unknown(cost_model, gpu, tp, error) from None


def plan_memory(cost_model: str, gpu: str, tp: int, *, chunk: int, max_num_seqs: int, utilization: float) -> MemoryPlan:
    """How `gpu_memory_utilization` of a GPU divides at this chunk size; UsageError as for `estimator`."""
    _config_path(cost_model)
    _package(PACKAGE)

    def build() -> dict[str, int]:
        return asdict(_plan(cost_model, gpu, tp, chunk, max_num_seqs, utilization))

    try:
        return MemoryPlan(**_kept(cost_model, f"memory-{gpu}-{tp}-{chunk}-{max_num_seqs}-{utilization}", build))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unknown(cost_model, gpu, tp, error) from None


def _plan(cost_model: str, gpu: str, tp: int, chunk: int, max_num_seqs: int, utilization: float) -> MemoryPlan:
    memory = _package(f"{PACKAGE}.sdk.memory")
    database = _package(f"{PACKAGE}.sdk.perf_database")
    version = database.resolve_query_version(gpu, BACKEND, "current")
    part = memory.KVCacheEstimator.from_request(
        cost_model, gpu, BACKEND, version, max_num_tokens=chunk, max_batch_size=max_num_seqs, tp_size=tp
    ).breakdown
    total, weights = int(part["gpu_memory_capacity_bytes"]), int(part["weights_bytes"])
    activation = int(part["non_kv_bytes"]) - weights
    kv = int(total * utilization) - weights - activation
    return MemoryPlan(
        total_bytes=total,
        weights_bytes=weights,
        activation_bytes=activation,
        kv_bytes=kv,
        kv_bytes_per_token=int(part["kv_size_per_token_bytes"]),
        kv_tokens=int(part["tokens_from_kv_bytes"](kv)) if kv > 0 else 0,
    )


def _package(module: str) -> Any:
    logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the simulated engine needs aiconfigurator-core for its step times, and it does not import ({error})",
            "Install it: pip install 'chunktune[sim]'",
        ) from None


@lru_cache(maxsize=1)
def _configs() -> dict[str, Path]:
    folder = Path(_package(PACKAGE).__file__).parent / "model_configs"
    return {path.name.removesuffix("_config.json").replace("--", "/", 1): path for path in folder.glob("*_config.json")}


def _config_path(cost_model: str) -> Path:
    """Refuses unknown names, for which the package would go to the network."""
    known = _configs()
    if cost_model in known:
        return known[cost_model]
    local = Path(cost_model) / "config.json"
    if local.is_file():
        return local
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


def _kept(cost_model: str, key: str, build: Any) -> Any:
    """`build()`, or what it gave before; a cache that cannot be read or written only costs the time again."""
    if cost_model not in _configs():
        # A folder of the user's own can change under its name.
        return build()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "chunktune" / f"costs-{FORMAT}-{metadata.version('aiconfigurator-core')}"
    path = folder / f"{cost_model.replace('/', '--')}-{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads(path.read_text())["value"]
    value = build()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"value": value}, file)
        os.replace(temporary, path)
    return value
