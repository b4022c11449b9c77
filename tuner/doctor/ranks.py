"""Over how many GPUs a profile spreads an engine, and whether there are as many. Pure."""

from __future__ import annotations

from tuner.doctor.line import Line, ok, wrong
from tuner.domain.profile import KnobRange, Profile
from tuner.domain.setting import Scalar
from tuner.engine.ranks import ONE_MODEL, gpus_of_node, size, whole

_CHECK = "gpu count"
_SIMULATED = "tensor_parallel_size"
"""The only way of spreading that the simulated engine has."""


def judge_visible(profile: Profile, visible: int) -> Line:
    """The GPUs that vLLM asks of this node against those that it can see."""
    wanted = gpus_of_node(largest_args(profile))
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
    for name in (*ONE_MODEL, "data_parallel_size"):
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


def largest_args(profile: Profile) -> dict[str, Scalar]:
    """`engine.args` with the largest of each parallel size that the space tries."""
    sizes = {name: _largest(profile, name) for name in (*ONE_MODEL, "data_parallel_size")}
    return {**profile.engine.args, **sizes}


def _spread(profile: Profile) -> str:
    sizes = {name: _largest(profile, name) for name in (*ONE_MODEL, "data_parallel_size")}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _largest(profile: Profile, name: str) -> int:
    """Of the untouched configuration and every setting."""
    spec = profile.space.knobs.get(name, [])
    tried = [spec.high] if isinstance(spec, KnobRange) else spec
    return max([size(profile.engine.args, name), *(n for v in tried if (n := whole(v)) is not None)])
