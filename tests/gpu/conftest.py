"""Skips this folder, with the reason, where there is no NVIDIA device."""

import pytest

from tuner.telemetry import describe_devices
from tuner.telemetry.nvml import DeviceFacts


@pytest.fixture(scope="session", autouse=True)
def devices() -> DeviceFacts:
    found = describe_devices()
    if not found.devices:
        pytest.skip(f"no NVIDIA device here: {found.reason}")
    return found
