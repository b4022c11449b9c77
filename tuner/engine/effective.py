"""What the engine really runs: read back from its log, `/server_info` and `/metrics`. Pure but for one look-up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.domain.experiment import Diagnosis
from tuner.domain.observation import MemoryBreakdown
from tuner.domain.setting import CHUNK_KNOB, Scalar
from tuner.domain.units import sized
from tuner.engine.diagnosis import cause
from tuner.engine.logs import clean

_GIB = 1024**3
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_KV_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) (?:GiB|GB)")
_POOL = re.compile(
    r"Available KV cache memory: ([\d.]+) GiB|(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\)? ?\)?(?: GiB)? for KV"
    r"|reserved ([\d.]+) GiB memory for KV Cache"
)
_ACTIVATION = re.compile(r"([\d.]+) GiB for peak activation|PyTorch activation peak memory takes ([\d.]+)GiB")
_GRAPHS = re.compile(r"CUDA graph pool memory: [\d.]+ GiB \(actual\), ([\d.]+) GiB \(estimated\)")
_GRAPHS_COUNT = "CUDA graph memory profiling is enabled"
"""Then the number for peak activation holds the estimate for CUDA graphs (`gpu_worker.py`, vLLM 0.32)."""
_BLOCK = re.compile(r"Setting attention block size to (\d+) tokens")
_ENGINE = re.compile(r"Initializing a V\d LLM engine \(v([^)]+)\) with config: (.*)")
_VERSION = re.compile(r"(?:vLLM API server version|█.*version) +(\d\S*)")
_CONFIG_FIELDS = {
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "max_seq_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
}
_SECTIONS = ("scheduler_config", "cache_config", "model_config", "parallel_config")
_ALWAYS = (
    CHUNK_KNOB,
    "max_num_seqs",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "block_size",
    "gpu_memory_utilization",
    "tensor_parallel_size",
)
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class EffectiveConfig:
    """Read back after the start. `args` holds only what could be read, under vLLM's names.

    Memory is bytes of one device (the fullest, where ranks differ); KV tokens are summed over
    data-parallel engines.
    """

    args: dict[str, Scalar] = field(default_factory=dict)
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    breakdown: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    vllm_version: str | None = None
    model_revision: str | None = None
    warning: str = ""
    """Why less than usual could be read; '' where nothing is missing."""


def from_log(lines: Iterable[str]) -> EffectiveConfig:
    """What the log of a start says."""
    args: dict[str, Scalar] = {}
    tokens: dict[str, int] = {}
    weights: list[int] = []
    pools: list[int] = []
    activations: list[int] = []
    graphs: list[int] = []
    graphs_count = False
    block_size: int | None = None
    concurrency: float | None = None
    version: str | None = None
    revision: str | None = None
    for raw in lines:
        text = clean(raw).text
        if match := _CHUNKED.search(text):
            args[CHUNK_KNOB] = int(match[1])
            args["enable_chunked_prefill"] = True
        if match := _KV_SIZE.search(text):
            tokens[raw.partition(")")[0]] = int(match[1].replace(",", ""))
        if match := _CONCURRENCY.search(text):
            concurrency = float(match[1])
        if match := _WEIGHTS.search(text):
            weights.append(_bytes(match))
        if match := _POOL.search(text):
            pools.append(_bytes(match))
        if match := _ACTIVATION.search(text):
            activations.append(_bytes(match))
        if match := _GRAPHS.search(text):
            graphs.append(_bytes(match))
        graphs_count = graphs_count or _GRAPHS_COUNT in text
        if match := _BLOCK.search(text):
            block_size = int(match[1])
        if match := _VERSION.search(text):
            version = version or match[1]
        if match := _ENGINE.search(text):
            version = match[1]
            args |= _config_fields(match[2])
            found = re.search(r"\brevision='?([0-9A-Za-z._/-]+)'?", match[2])
            revision = None if found is None or found[1] == "None" else found[1]
    return EffectiveConfig(
        args=args,
        block_size=block_size,
        kv_cache_tokens=sum(tokens.values()) if tokens else None,
        max_concurrency=concurrency,
        breakdown=MemoryBreakdown(
            weights_bytes=max(weights, default=None),
            activation_peak_bytes=_without_graphs(activations, graphs if graphs_count else []),
            kv_pool_bytes=max(pools, default=None),
        ),
        vllm_version=version,
        model_revision=revision,
    )


def with_server_info(config: EffectiveConfig, info: Mapping[str, Any], asked: Iterable[str]) -> EffectiveConfig:
    """Completed by `/server_info`. Only options that were asked for and a fixed few are taken out of it:
    the rest may hold secrets."""
    sections = info.get("vllm_config")
    if not isinstance(sections, Mapping):
        return config
    args = dict(config.args)
    for key in dict.fromkeys((*_ALWAYS, *asked)):
        for section in _SECTIONS:
            values = sections.get(section)
            if isinstance(values, Mapping) and isinstance(values.get(key), bool | int | float):
                args[key] = values[key]
                break
    block = args.get("block_size")
    if isinstance(block, int) and _is_part(block, config.block_size):
        # The engine's own choice for the groups of a hybrid model, and no option that anybody gave.
        block = config.block_size
        del args["block_size"]
    revision = (sections.get("model_config") or {}).get("revision")
    return replace(
        config,
        args=args,
        block_size=block if isinstance(block, int) and not isinstance(block, bool) else config.block_size,
        model_revision=revision if isinstance(revision, str) else config.model_revision,
    )


def with_metrics(config: EffectiveConfig, metrics: str) -> EffectiveConfig:
    """Completed by `vllm:cache_config_info` of `/metrics`, which no development mode is needed for."""
    tokens = 0
    block_size = config.block_size
    args = dict(config.args)
    for match in _CACHE_INFO.finditer(metrics):
        labels = dict(_LABEL.findall(match["labels"]))
        stated = int(labels["block_size"]) if labels.get("block_size", "").isdigit() else 0
        if stated and not _is_part(stated, block_size):
            block_size = stated
            args.setdefault("block_size", block_size)
        if labels.get("kv_cache_size_tokens", "").isdigit():
            tokens += int(labels["kv_cache_size_tokens"])
        if labels.get("enable_prefix_caching") in ("True", "False"):
            args.setdefault("enable_prefix_caching", labels["enable_prefix_caching"] == "True")
    return replace(config, args=args, block_size=block_size, kv_cache_tokens=config.kv_cache_tokens or tokens or None)


def _is_part(block: int, of: int | None) -> bool:
    """Whether a block size is that of a part of larger blocks, as /metrics of a hybrid model has it."""
    return of is not None and block < of and of % block == 0


def difference(asked: Mapping[str, Scalar], effective: Mapping[str, Scalar]) -> Diagnosis | None:
    """`not_as_asked` for the first number or switch that runs differently; words are not compared, since
    vLLM resolves them (`auto`). A block size that divides the other is no difference: a hybrid model has both."""
    for key, given in asked.items():
        want, have = sized(key, given), effective.get(key)
        if not isinstance(want, bool | int | float) or not isinstance(have, bool | int | float):
            continue
        if key == "max_model_len" and want == -1:
            continue  # "whatever fits"
        if key == "block_size" and max(want, have) % max(min(want, have), 1) == 0:
            continue
        same = want is have if isinstance(want, bool) or isinstance(have, bool) else math.isclose(want, have)
        if not same:
            return cause("not_as_asked", f"{key} is {have}, asked for was {given}")
    return None


def hub_folder(env: Mapping[str, str]) -> Path:
    """Where the Hugging Face cache lies, by the variables that its own library reads."""
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    return Path(env.get("HF_HUB_CACHE") or Path(home) / "hub")


def blobs_folder(model: str, env: Mapping[str, str]) -> Path | None:
    """Where the files of a Hugging Face model are downloaded to; None for a model on disk."""
    return None if Path(model).is_dir() else _repository(model, env) / "blobs"


def cached_revision(model: str, env: Mapping[str, str], revision: str = "main") -> str | None:
    """The commit of a Hugging Face model in the local cache; None for a local path or an unknown one."""
    try:
        commit = (_repository(model, env) / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit or None


def _repository(model: str, env: Mapping[str, str]) -> Path:
    return hub_folder(env) / f"models--{model.replace('/', '--')}"


def _without_graphs(activations: Sequence[int], graphs: Sequence[int]) -> int | None:
    return max(max(activations) - max(graphs, default=0), 0) if activations else None


def _bytes(match: re.Match[str]) -> int:
    return round(float(next(g for g in match.groups() if g is not None)) * _GIB)


def _config_fields(text: str) -> dict[str, Scalar]:
    args: dict[str, Scalar] = {}
    for name, key in _CONFIG_FIELDS.items():
        match = re.search(rf"\b{name}=(True|False|\d+)\b", text)
        if match is not None:
            args[key] = match[1] == "True" if match[1] in ("True", "False") else int(match[1])
    return args


def read_log(path: Path, *, head_bytes: int = 1 << 20, tail_bytes: int = 8 << 20) -> Sequence[str]:
    """The lines of a log; of a very long one the beginning and the end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size <= head_bytes + tail_bytes:
                data = file.read()
            else:
                data = file.read(head_bytes)
                file.seek(size - tail_bytes)
                data += b"\n" + file.read()
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()
