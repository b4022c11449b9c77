"""Over how many GPUs of this node an engine is spread. Pure; the rules of vLLM 0.32's parallel configuration."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

from tuner.domain.setting import Scalar

ONE_MODEL: Final = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""Options whose product is the number of GPUs that hold one copy of the model."""


def gpus_of_node(args: Mapping[str, Scalar]) -> int | None:
    """How many GPUs these `vllm serve` options use on the node where it starts; None where Ray decides."""
    if "ray" in (args.get("distributed_executor_backend"), args.get("data_parallel_backend")):
        return None
    one_model = prod(size(args, name) for name in ONE_MODEL)
    total, nodes = size(args, "data_parallel_size"), size(args, "nnodes")
    if nodes > 1:
        return max(one_model * total // nodes, 1)
    external = bool(args.get("data_parallel_external_lb")) or args.get("data_parallel_rank") is not None
    local = 1 if external else whole(args.get("data_parallel_size_local"))
    return one_model * (total if local is None else local)


def size(args: Mapping[str, Scalar], name: str) -> int:
    """The option's value; 1 where nobody sets it, as in vLLM."""
    value = whole(args.get(name))
    return 1 if value is None else value


def whole(value: object) -> int | None:
    """The value as a whole number; None when it is no number."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
