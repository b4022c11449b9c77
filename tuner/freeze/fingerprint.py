"""What differs between the surroundings of a frozen file and those of now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.domain.experiment import Fingerprint

GIB = 2**30
_SAME_MEMORY = 0.02
"""Drivers report a device's memory with small differences; a smaller relative one is no other GPU."""


@dataclass(frozen=True)
class Difference:
    """One thing that changed. `comparable` False: the two measurements are of different things."""

    field: str
    frozen: str
    now: str
    comparable: bool

    def __str__(self) -> str:
        return f"{self.field}: {self.frozen} when frozen, {self.now} now"


def differences(frozen: Fingerprint, now: Fingerprint) -> list[Difference]:
    """Everything that both sides know and that differs; the incomparable ones first.

    A side that does not know a value says nothing about it: no difference.
    """
    found = [
        *_differing("engine", frozen.engine, now.engine, comparable=False),
        *_differing("model", frozen.model, now.model, comparable=False),
        *_gpus(frozen.gpus, now.gpus),
        *_differing("vLLM", frozen.vllm_version, now.vllm_version, comparable=True),
        *_differing("driver", frozen.driver_version, now.driver_version, comparable=True),
        *_differing("model revision", frozen.model_revision, now.model_revision, comparable=True),
    ]
    return sorted(found, key=lambda d: d.comparable)


def describe_gpus(gpus: Sequence[dict[str, Any]]) -> str:
    """`4 x NVIDIA H100 (80 GiB)`; several kinds are joined by `+`."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        memory = gpu.get("memory_bytes")
        size = f" ({memory / GIB:.0f} GiB)" if isinstance(memory, int | float) and memory else ""
        name = f"{gpu.get('name', 'unknown GPU')}{size}"
        counts[name] = counts.get(name, 0) + 1
    return " + ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def _differing(field: str, frozen: str | None, now: str | None, *, comparable: bool) -> list[Difference]:
    if frozen is None or now is None or frozen == now:
        return []
    return [Difference(field, frozen, now, comparable)]


def _gpus(frozen: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[Difference]:
    if not frozen and not now:
        return []
    same = len(frozen) == len(now) and all(
        _same_gpu(a, b) for a, b in zip(sorted(frozen, key=_name), sorted(now, key=_name), strict=True)
    )
    return [] if same else [Difference("GPU", describe_gpus(frozen), describe_gpus(now), comparable=False)]


def _name(gpu: dict[str, Any]) -> str:
    return str(gpu.get("name", ""))


def _same_gpu(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if _name(a) != _name(b):
        return False
    memory = a.get("memory_bytes"), b.get("memory_bytes")
    if not all(isinstance(m, int | float) and m > 0 for m in memory):
        return True
    left, right = (float(m) for m in memory if m is not None)
    return abs(left - right) <= _SAME_MEMORY * max(left, right)
