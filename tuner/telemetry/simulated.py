"""The simulated engine's memory, asked over HTTP from the sampler's thread."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tuner.domain.observation import MemoryBreakdown, MemorySample
from tuner.telemetry.source import SourceError, SourceName

PATH = "/chunktune/memory"
_TIMEOUT_S = 2.0


class SimulatedSource:
    """Devices of the simulated engine, over one kept connection that no proxy variable can turn."""

    name: SourceName = "simulated"

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        if url.scheme != "http" or url.hostname is None:
            raise ValueError(f"{base_url!r} is no http URL of a simulated engine")
        self.reason = ""
        self._connection = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=_TIMEOUT_S)
        self._totals: dict[str, int] = {}
        self._breakdown = MemoryBreakdown()
        self._closed = False

    def open(self) -> None:
        if not self._totals and not self._look():
            raise SourceError(self.reason)

    def sample(self, at_s: float) -> list[MemorySample]:
        if self._closed:
            return []
        return [
            MemorySample(at_s, str(d["device"]), int(d["used_bytes"]), _share(d.get("utilization")))
            for d in self._look()
        ]

    def _look(self) -> list[dict[str, Any]]:
        try:
            answer = self._get()
            devices: list[dict[str, Any]] = answer["devices"]
            self._totals = {str(d["device"]): int(d["total_bytes"]) for d in devices}
            parts = answer.get("breakdown") or {}
            known = ("weights_bytes", "activation_peak_bytes", "kv_pool_bytes", "kv_in_use_peak_bytes")
            self._breakdown = MemoryBreakdown(**{name: parts.get(name) for name in known})
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            self._connection.close()
            self.reason = f"the simulated engine's {PATH} did not answer: {error or type(error).__name__}"
            return []
        return devices

    def _get(self) -> dict[str, Any]:
        self._connection.request("GET", PATH)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
        return answer

    def breakdown(self) -> MemoryBreakdown:
        """The parts of memory as of the last look."""
        return self._breakdown

    def total_bytes(self) -> Mapping[str, int]:
        return dict(self._totals)

    def close(self) -> None:
        self._closed = True
        self._connection.close()


def _share(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
