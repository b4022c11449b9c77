"""What a measurement depends on beside the configuration: vLLM, model, GPUs, driver."""

from __future__ import annotations

import os

from tuner.domain.experiment import Fingerprint
from tuner.domain.profile import Profile
from tuner.engine.installed import inspect_installed
from tuner.engine.ranks import gpus_of_node
from tuner.experiment.choice import EngineChoice
from tuner.telemetry import describe_devices


async def take_fingerprint(choice: EngineChoice, profile: Profile) -> Fingerprint:
    """Asks the installed engine and NVML about the GPUs that the profile's engine uses.

    EngineError when the engine's command does not even answer.
    """
    installed = await inspect_installed(choice.launcher, {**choice.env, **profile.engine.env})
    if choice.simulated:
        hardware = profile.hardware
        gpus = [{"name": f"simulated {hardware.gpu}", "memory_bytes": None} for _ in range(hardware.count)]
        return Fingerprint(vllm_version=installed.version, model=profile.model, gpus=gpus, engine="sim")
    facts = describe_devices({**os.environ, **profile.engine.env}, gpus_of_node(profile.engine.args))
    return Fingerprint(
        vllm_version=installed.version,
        model=profile.model,
        gpus=[{"name": device.name, "memory_bytes": device.memory_bytes} for device in facts.devices],
        driver_version=facts.driver_version,
        engine="vllm",
    )
