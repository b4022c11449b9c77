"""Over how many GPUs a profile spreads an engine, and whether there are as many. Pure."""

from __future__ import annotations

from math import prod

from tuner.doctor.line import Line, ok, wrong
from tuner.domain.profile import KnobRange, Profile

_CHECK = "gpu count"
_ONE_MODEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
_SIMULATED = "tensor_parallel_size"
"""The only way of spreading that the simulated engine has."""


def judge_visible(profile: Profile, visible: int) -> Line:
    """The GPUs that vLLM asks of this node against those that it can see."""
    wanted = gpus_of_node(profile)
    if wanted is None:
        return ok(_CHECK, f"{visible} visible; Ray spreads the engine over nodes, so what it needs here is not known")
    if wanted > visible:
        return wrong(
            _CHECK,
            f"the profile spreads the engine over {wanted} GPUs ({_spread(profile)}), {visible} are visible",
            "Lower engine.args.tensor_parallel_size, or check CUDA_VISIBLE_DEVICES.",
        )
    return ok(_CHECK, f"{wanted} of {visible} needed")


def judge_pretended(profile: Profile, count: int | None) -> Line:
    """The same on the simulated engine. `count` None: it pretends to have as many as it is asked for."""
    for name in (*_ONE_MODEL, "data_parallel_size"):
        if name != _SIMULATED and _largest(profile, name) > 1:
            return wrong(
                _CHECK,
                f"the simulated engine has no {name} ({_largest(profile, name)})",
                f"Spread it by {_SIMULATED}, or leave this profile to a real vLLM.",
            )
    wanted = _largest(profile, _SIMULATED)
    if count is not None and wanted > count:
        return wrong(
            _CHECK,
            f"the profile spreads the model over {wanted} GPUs ({_spread(profile)}), hardware.count is {count}",
            f"Set hardware.count: {wanted}, or lower engine.args.{_SIMULATED}.",
        )
    return ok(_CHECK, f"{wanted} of {wanted if count is None else count} needed")


def gpus_of_node(profile: Profile) -> int | None:
    """How many GPUs vLLM 0.32 wants on the node where it starts; None where Ray decides."""
    args = profile.engine.args
    if "ray" in (args.get("distributed_executor_backend"), args.get("data_parallel_backend")):
        return None
    one_model = prod(_largest(profile, name) for name in _ONE_MODEL)
    total, nodes = _largest(profile, "data_parallel_size"), _largest(profile, "nnodes")
    external = bool(args.get("data_parallel_external_lb")) or args.get("data_parallel_rank") is not None
    if nodes > 1:
        return max(one_model * total // nodes, 1)
    local = 1 if external else _whole(args.get("data_parallel_size_local"))
    return one_model * (total if local is None else local)


def _spread(profile: Profile) -> str:
    sizes = {name: _largest(profile, name) for name in (*_ONE_MODEL, "data_parallel_size")}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _largest(profile: Profile, name: str) -> int:
    """Of the untouched configuration and every candidate; 1 where nobody names it, as in vLLM."""
    spec = profile.space.knobs.get(name, [])
    tried = [spec.high] if isinstance(spec, KnobRange) else spec
    return max([1, *(n for v in (profile.engine.args.get(name), *tried) if (n := _whole(v)) is not None)])


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
