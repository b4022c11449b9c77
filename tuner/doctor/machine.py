"""The engine on this machine: vLLM, the scheduler plug-in in its environment, GPUs and who else uses them."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.doctor.line import Line, ok, warning, wrong
from tuner.doctor.ranks import judge_pretended, judge_visible, largest_args
from tuner.domain.profile import DEFAULT_GPU_MEMORY_UTILIZATION, Profile
from tuner.engine.installed import InstalledEngine, ask, check_options, inspect_installed, interpreter_of
from tuner.engine.launch import plugin_folder
from tuner.engine.ranks import gpus_of_node
from tuner.errors import ChunktuneError, EngineError, UsageError
from tuner.experiment.checks import check_before_start
from tuner.experiment.choice import EngineChoice
from tuner.telemetry import DeviceFact, DeviceFacts

_GIB = 1 << 30
_PLUGIN = "from tuner.scheduler import ReuseBudgetScheduler as s; print('loaded', s.__name__)"
_CPU_BLOCK = 32
"""CPU attention takes multiples of this (vLLM 0.32)."""


async def judge_engine(choice: EngineChoice, profile: Profile) -> tuple[list[Line], InstalledEngine | None]:
    """What would be launched, whether it has the profile's options, and whether the plug-in loads there."""
    if choice.simulated:
        gpus = judge_pretended(profile, _pretended_gpus(choice))
        return [*_simulated(choice), await _taken(choice, profile), gpus], None
    env = {**choice.env, **profile.engine.env}
    try:
        installed = await inspect_installed(choice.launcher, env)
    except ChunktuneError as error:
        return [wrong("vllm", error.message, error.hint or "Run `vllm serve --help` by hand and see.")], None
    lines = [_version(choice, installed), _options(profile, installed), _blocks(profile, installed)]
    lines.append(await _plugin(choice, profile, env))
    return lines, installed


def _simulated(choice: EngineChoice) -> list[Line]:
    asked = "asked for" in choice.reason
    lines = [
        ok("vllm", f"not used: the SIMULATED engine was {choice.reason}")
        if asked
        else warning(
            "vllm",
            f"the SIMULATED engine would be used: {choice.reason}",
            "Install vLLM (pip install vllm) on a machine with an NVIDIA GPU, or point --vllm at its command.",
        )
    ]
    if importlib.util.find_spec("aiconfigurator_core") is None:
        lines.append(
            wrong("simulated engine", "the package aiconfigurator-core is missing", "pip install 'chunktune[sim]'")
        )
    else:
        lines.append(ok("simulated engine", "its cost tables (aiconfigurator-core) are installed"))
    return lines


async def _taken(choice: EngineChoice, profile: Profile) -> Line:
    """Whether the simulated engine takes the options and knobs, by what a sweep asks before its first start."""
    try:
        await check_before_start(profile, choice)
    except ChunktuneError as error:
        return wrong("vllm options", error.message, error.hint or "See docs/knobs.md for the names.")
    return ok("vllm options", "the simulated engine has those of the profile")


def _pretended_gpus(choice: EngineChoice) -> int | None:
    count = json.loads(choice.env["CHUNKTUNE_SIM"]).get("count")
    return count if isinstance(count, int) else None


def _version(choice: EngineChoice, installed: InstalledEngine) -> Line:
    command = " ".join(choice.launcher)
    if installed.version is None:
        return warning("vllm", f"`{command}` does not say its version", "Run `vllm --version` by hand and see.")
    return ok("vllm", f"`{command}` is version {installed.version}")


def _options(profile: Profile, installed: InstalledEngine) -> Line:
    if not installed.options:
        return warning("vllm options", "`serve --help=all` gives no options to compare with", "Run it by hand and see.")
    try:
        check_options(installed, {**profile.engine.args, **dict.fromkeys(profile.space.knobs, None)})
    except EngineError as error:
        return wrong("vllm options", error.message, error.hint)
    return ok("vllm options", "this vLLM has every option of the profile")


def _blocks(profile: Profile, installed: InstalledEngine) -> Line:
    block = profile.engine.args.get("block_size")
    on_cpu = (installed.version or "").endswith("+cpu")
    if not on_cpu:
        return ok("engine block size", "16 unless the profile or the engine says otherwise; read back at each start")
    if isinstance(block, int) and block % _CPU_BLOCK == 0:
        return ok("engine block size", f"{block}, as the CPU build takes it")
    return wrong(
        "engine block size",
        f"the CPU build of vLLM takes multiples of {_CPU_BLOCK} tokens, the profile has {block or 'none'}",
        f"Set engine.args.block_size: {_CPU_BLOCK}.",
    )


async def _plugin(choice: EngineChoice, profile: Profile, env: Mapping[str, str]) -> Line:
    check = "scheduler plug-in"
    needed = bool(profile.space.reuse_budget)
    python = interpreter_of(choice.launcher, env)
    if python is None:
        return warning(
            check,
            f"the Python behind {choice.launcher[0]!r} cannot be told, so the plug-in was not tried",
            "Only a space with reuse_budget needs it.",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(p for p in (str(plugin_folder(Path(folder))), os.environ.get("PYTHONPATH", "")) if p)
        try:
            answer = await ask([python, "-c", _PLUGIN], {**env, "PYTHONPATH": path})
        except EngineError as error:
            return warning(check, error.message, error.hint)
    if answer.code == 0 and "loaded" in answer.output:
        return ok(check, f"loads in vLLM's environment ({python})")
    last = next((text for text in reversed(answer.output.splitlines()) if text.strip()), "it said nothing")
    say = wrong if needed else warning
    return say(
        check,
        f"does not load in vLLM's environment ({python}): {last.strip()}",
        "Only a space with reuse_budget needs it: take that out, or install a vLLM that the plug-in knows.",
    )


def judge_devices(facts: DeviceFacts, profile: Profile, *, needed: bool, cuda: int | None = None) -> list[Line]:
    """GPUs, driver, NVML, other tenants and free memory of the GPUs that an engine would use. Pure.

    `needed`: an engine will want them. `cuda`: the major version of CUDA that it was built for.
    """
    names = ", ".join(f"{d.name} ({d.memory_bytes / _GIB:.0f} GiB)" for d in facts.devices)
    if not needed:
        return [ok("gpu", f"none is needed here ({names or facts.reason or 'none found'})")]
    if not facts.devices:
        return [
            wrong(
                "gpu",
                f"no NVIDIA GPU: {facts.reason or 'none found'}",
                "Check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES; or take --engine sim.",
            )
        ]
    used = facts.devices[: gpus_of_node(largest_args(profile))]
    return [
        ok("gpu", names),
        ok("nvml", f"answers; driver {facts.driver_version or 'unknown'}"),
        _driver(facts, cuda),
        judge_visible(profile, len(facts.devices)),
        _tenants(used),
        _free_memory(used, profile),
    ]


def _driver(facts: DeviceFacts, cuda: int | None) -> Line:
    if facts.driver_cuda is None or cuda is None:
        return ok("driver", "the versions of CUDA that it and vLLM have cannot be compared")
    if facts.driver_cuda < cuda:
        return wrong(
            "driver",
            f"driver {facts.driver_version} runs CUDA up to {facts.driver_cuda}, vLLM's PyTorch was built for {cuda}",
            "Update the driver, or install a vLLM that was built for the driver's CUDA.",
        )
    return ok("driver", f"runs CUDA {facts.driver_cuda}, vLLM's PyTorch was built for {cuda}")


def _tenants(devices: Sequence[DeviceFact]) -> Line:
    found = [
        f"pid {t.pid} ({t.used_bytes / _GIB:.1f} GiB)" if t.used_bytes is not None else f"pid {t.pid}"
        for device in devices
        for t in device.tenants
    ]
    if found:
        return warning(
            "other tenants",
            f"others use these devices: {', '.join(found[:8])}; times and memory will not be yours alone",
            "End them or choose other devices with CUDA_VISIBLE_DEVICES (pids are the host's).",
        )
    return ok("other tenants", "none")


def _free_memory(devices: Sequence[DeviceFact], profile: Profile) -> Line:
    target = profile.engine.args.get("gpu_memory_utilization")
    if not isinstance(target, int | float) or isinstance(target, bool):
        target = DEFAULT_GPU_MEMORY_UTILIZATION
    for device in devices:
        free = device.memory_bytes - device.used_bytes
        if free < target * device.memory_bytes:
            return wrong(
                "free memory",
                f"{device.name}: {free / _GIB:.1f} of {device.memory_bytes / _GIB:.1f} GiB are free, the engine will "
                f"ask for {target * device.memory_bytes / _GIB:.1f} (gpu_memory_utilization {target:g})",
                "Free the device, or lower engine.args.gpu_memory_utilization.",
            )
    return ok("free memory", f"enough for gpu_memory_utilization {target:g} on every device")


def missing_engine(error: UsageError) -> Line:
    """The line for an engine that was asked for and is not there."""
    return wrong("vllm", error.message, error.hint)
