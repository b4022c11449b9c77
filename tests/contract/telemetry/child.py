"""What a memory source shows, as JSON: run in a process of its own where NVML has to be another library.

python child.py facts|samples|first|describe|choose|sampler [ARGUMENT...]
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

from tuner.telemetry import MemorySource, NvmlSource, Sampler, SourceError, describe_devices, memory_source


def facts(source: MemorySource) -> dict[str, Any]:
    """The contract of a source that works, put to the test; AssertionError names what is broken."""
    source.open()
    source.open()
    first, second = source.sample(10.0), source.sample(11.5)
    totals = source.total_bytes()
    for at_s, samples in ((10.0, first), (11.5, second)):
        assert samples, "a source that opened shows something"
        for sample in samples:
            assert sample.at_s == at_s, "samples carry the time they were given"
            assert 0 < sample.used_bytes <= totals[sample.device], "use is within the device's capacity"
            assert sample.utilization is None or 0 <= sample.utilization <= 1, "utilization is a share"
    assert [s.device for s in first] == [s.device for s in second], "devices keep their names"
    source.close()
    source.close()
    assert isinstance(source.sample(12.0), list), "a closed source may be empty, and never raises"
    return {"name": source.name, "devices": [s.device for s in first], "totals": dict(totals)}


def samples(count: int, uuids: list[str], devices: int | None = None) -> dict[str, Any]:
    source = NvmlSource(uuids or None, pids=lambda: [4242], count=devices)
    try:
        source.open()
    except SourceError as error:
        return {"error": str(error)}
    looks = [[dataclasses.asdict(s) for s in source.sample(float(i))] for i in range(count)]
    totals = dict(source.total_bytes())
    source.close()
    return {"looks": looks, "totals": totals, "reason": source.reason}


def choose(ours: bool) -> dict[str, Any]:
    source = memory_source("vllm", "http://127.0.0.1:9", (lambda: [os.getpid()]) if ours else None)
    seen = source.sample(0.0)
    return {"name": source.name, "reason": source.reason, "used": [s.used_bytes for s in seen]}


def sampler(seconds: float) -> dict[str, Any]:
    running = Sampler(NvmlSource(), 0.02)
    from_s = time.monotonic()
    running.start()
    time.sleep(seconds)
    asked_s = time.monotonic()
    running.stop()
    timeline = running.timeline(from_s, time.monotonic())
    return {
        "source": timeline.source,
        "used": [s.used_bytes for s in timeline.samples],
        "reason": timeline.reason,
        "stop_s": time.monotonic() - asked_s,
    }


def main(command: str, *arguments: str) -> Any:
    match command:
        case "facts":
            return facts(NvmlSource())
        case "samples":
            return samples(int(arguments[0]), list(arguments[1:]))
        case "first":
            return samples(1, [], int(arguments[0]))
        case "describe":
            return dataclasses.asdict(describe_devices())
        case "choose":
            return choose(arguments == ("ours",))
        case "sampler":
            return sampler(float(arguments[0]))
    raise SystemExit(f"no command {command!r}")


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
