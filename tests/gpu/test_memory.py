"""The NVML sampler against memory that is taken and given back on purpose."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuner.telemetry import NvmlSource, Sampler
from tuner.telemetry.nvml import DeviceFacts

MIB = 1 << 20
SLACK_BYTES = 64 * MIB
"""Other tenants breathe; allocations are rounded up to pages of 2 MiB."""


def python_with_torch() -> str:
    """CHUNKTUNE_TEST_PYTHON, else the Python of the `vllm` command, else this one (which needs no torch)."""
    asked = os.environ.get("CHUNKTUNE_TEST_PYTHON")
    vllm = shutil.which(os.environ.get("CHUNKTUNE_TEST_VLLM", "vllm"))
    beside = Path(vllm).resolve().with_name("python") if vllm else None
    return asked or (str(beside) if beside and beside.exists() else sys.executable)


class Allocator:
    """`allocate.py` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.uuid = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the allocator ended with {self._process.wait(30)}"
        return line

    def ask(self, request: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return int(self._read())


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    script = Path(__file__).with_name("allocate.py")
    pipe = subprocess.PIPE
    with subprocess.Popen([python_with_torch(), script], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Allocator(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def settled(look: Callable[[], int], expected: int) -> int:
    """The first look within the slack of what is expected, or the last one after 10 s."""
    deadline_s = time.monotonic() + 10
    while abs((seen := look()) - expected) > SLACK_BYTES and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("size", [256 * MIB, 1024 * MIB, 2048 * MIB])
def test_a_known_allocation_is_seen_to_the_slack(allocator: Allocator, devices: DeviceFacts, size: int) -> None:
    source = NvmlSource([allocator.uuid], pids=lambda: [allocator.pid])
    source.open()
    try:
        look = lambda: source.sample(0.0)[0].used_bytes  # noqa: E731
        before = settled(look, look())
        taken = allocator.ask(f"take {size}")
        assert settled(look, before + taken) - before == pytest.approx(taken, abs=SLACK_BYTES)
        allocator.ask("give")
        assert settled(look, before) == pytest.approx(before, abs=SLACK_BYTES)
    finally:
        source.close()


def test_a_short_peak_is_in_the_timeline(allocator: Allocator, devices: DeviceFacts) -> None:
    sampler = Sampler(NvmlSource([allocator.uuid]), 0.02)
    from_s = time.monotonic()
    sampler.start()
    try:
        time.sleep(0.3)
        taken = allocator.ask(f"take {1024 * MIB}")
        time.sleep(0.3)
        allocator.ask("give")
        time.sleep(0.3)
    finally:
        sampler.stop()
    timeline = sampler.timeline(from_s, time.monotonic())
    used = [s.used_bytes for s in timeline.samples]
    assert timeline.source == "nvml"
    assert len(used) >= 15
    assert max(used) - used[0] == pytest.approx(taken, abs=SLACK_BYTES)
    assert used[-1] == pytest.approx(used[0], abs=SLACK_BYTES)
    assert max(used) <= timeline.total_bytes[allocator.uuid]


def test_the_devices_are_described(devices: DeviceFacts) -> None:
    assert devices.driver_version
    for device in devices.devices:
        assert device.uuid.startswith(("GPU-", "MIG-"))
        assert 0 <= device.used_bytes <= device.memory_bytes
