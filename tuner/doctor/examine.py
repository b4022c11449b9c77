"""The examination as a whole: which checks, in which order."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.doctor.line import Line, ok, wrong
from tuner.doctor.machine import judge_devices, judge_engine, missing_engine
from tuner.doctor.sense import judge_profile
from tuner.doctor.server import judge_server
from tuner.doctor.surroundings import judge_surroundings, proxies
from tuner.domain.profile import Profile
from tuner.engine.installed import cuda_runtime
from tuner.errors import UsageError
from tuner.experiment.checks import check_load
from tuner.experiment.choice import EngineOption, choose_engine
from tuner.load.target import Target
from tuner.space.search_space import declared_block_size
from tuner.telemetry import describe_devices


@dataclass(frozen=True)
class Request:
    """What to examine: a server that runs (`url`), or this machine."""

    profile: Profile
    engine: EngineOption = "auto"
    vllm: str | None = None
    out: Path = Path("results")
    url: str | None = None
    api_key: str | None = None
    model: str | None = None


async def examine(request: Request, clock: Clock = SYSTEM_CLOCK) -> list[Line]:
    """All findings, the decisive ones first. UsageError only for a request that makes no sense."""
    profile = request.profile
    env = {**os.environ, **profile.engine.env}
    if request.url is not None:
        target = Target(
            base_url=request.url,
            model=request.model,
            api=profile.workload.api,
            api_key=request.api_key,
            request_timeout_s=min(profile.workload.request_timeout, 60.0),
        )
        return [*await judge_server(target, profile, clock, env), *_load(profile), proxies(env)]
    facts = describe_devices(env)
    simulated = on_cpu = False
    cuda = None
    needed = request.engine == "vllm" or request.vllm is not None
    lines: list[Line] = []
    try:
        choice = choose_engine(request.engine, request.vllm, profile.hardware, profile.model)
    except UsageError as error:
        lines.append(missing_engine(error))
    else:
        found, installed = await judge_engine(choice, profile)
        lines += found
        simulated = choice.simulated
        needed = not simulated
        cuda = None if simulated else await asyncio.to_thread(cuda_runtime, choice.launcher)
        on_cpu = installed is not None and (installed.version or "").endswith("+cpu")
    lines += judge_devices(facts, profile, needed=needed and not on_cpu, cuda=cuda)
    lines += [*_load(profile), *judge_profile(profile, declared_block_size(profile))]
    return [*lines, *judge_surroundings(profile, request.out, env, simulated=simulated)]


def _load(profile: Profile) -> list[Line]:
    """Whether the load can be sent and shows what the profile asks of it; its figures where a file says them."""
    try:
        said = check_load(profile)
    except UsageError as error:
        return [wrong("load", error.message, error.hint or "See docs/profile.md for the format.")]
    return [ok("load", said)] if said else []
