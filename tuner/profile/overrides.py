"""`--set dotted.key=value`: one field of a profile, from the command line."""

from __future__ import annotations

from typing import Any

import yaml

from tuner.errors import UsageError


def apply_overrides(value: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """`value` with every override laid over it; values are read as YAML (`[64, 128]`, `20m`, `true`)."""
    result: dict[str, Any] = dict(value)
    for text in overrides:
        dotted, equals, raw = text.partition("=")
        if not equals or not dotted.strip():
            raise UsageError(f"--set {text!r} has no '='", "Write --set workload.requests=100, for example.")
        try:
            new = yaml.safe_load(raw)
        except (yaml.YAMLError, ValueError):
            raise UsageError(f"--set {text[:80]!r}: the value is not valid YAML") from None
        except RecursionError:
            raise UsageError(f"--set {text[:40]!r}...: the value is nested too deeply") from None
        result = _with(result, dotted.strip().split("."), new, text)
    return result


def _with(value: Any, keys: list[str], new: Any, text: str) -> Any:
    head, *rest = keys
    if isinstance(value, list):
        if not head.isdecimal() or int(head) >= len(value):
            raise UsageError(f"--set {text!r}: {head!r} is no index of a list of {len(value)}")
        copied = list(value)
        copied[int(head)] = _with(value[int(head)], rest, new, text) if rest else new
        return copied
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"--set {text!r}: {head!r} lies below a plain value")
    mapping = dict(value or {})
    mapping[head] = _with(mapping.get(head), rest, new, text) if rest else new
    return mapping
