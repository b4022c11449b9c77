"""Units as people write them: durations ("20m", "250ms"), sizes ("64K"), ranges of tokens, nouns with a number."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration_s(text: str) -> float:
    """Seconds in "90m", "2h", "250ms" or "1h30m". ValueError when the unit is missing or unknown."""
    compact = text.strip().replace(" ", "")
    parts = _PART.findall(compact)
    if not parts or "".join(n + u for n, u in parts) != compact:
        raise ValueError(f"{text!r} is no duration: write a number with a unit, such as 250ms, 90s, 20m or 2h")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SIZE_OPTION = re.compile(r"_(tokens|len|seqs|size|bytes|blocks|threshold)(_override)?$")


def parse_size(text: str) -> int:
    """A whole number as vLLM reads sizes: "2048", "2k" (2,000), "2K" (2,048), also with m, g, t and M, G, T.

    ValueError for anything else; a fraction goes with the decimal units alone ("25.6k").
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        if not text.strip().isdecimal():
            raise ValueError(f"{text!r} is no size: write a whole number, or 2k for 2,000 and 2K for 2,048")
        return int(text)
    number, unit = match.groups()
    power = 1 + "kmgt".index(unit.lower())
    if unit.islower():
        return int(float(number) * 10 ** (3 * power))
    if "." in number:
        raise ValueError(f"{text!r} is no whole number: {unit} counts in powers of 1,024; write {number}{unit.lower()}")
    return int(number) << (10 * power)


def sized(option: str, value: Any) -> Any:
    """The value of a `vllm serve` option, as a number where the option is a size that was written as text ("64K")."""
    if isinstance(value, list):
        return [sized(option, each) for each in value]
    if isinstance(value, dict):
        return {name: sized(option, each) for name, each in value.items()}
    if isinstance(value, str) and _SIZE_OPTION.search(option):
        try:
            return parse_size(value)
        except ValueError:
            return value
    return value


def format_duration(seconds: float) -> str:
    """A duration for people: "45 s", "3 min 05 s", "2 h 10 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Words of a server, a log or a file for people: control characters, which could steer a terminal, and halves of
    characters become "?"."""
    return _CONTROL.sub("?", text)


def counted(number: int, noun: str) -> str:
    """A number of things for people: "1 trial", "2 trials"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration_before(value: Any) -> Any:
    return parse_duration_s(value) if isinstance(value, str) else _refuse_bare_number(value)


def _refuse_bare_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("write a duration with a unit, such as 250ms, 90s, 20m or 2h")
    if value != 0:
        raise ValueError(f"{value} has no unit: write {value}s, {value}ms or {value}m")
    return 0.0


def _duration_out(seconds: float) -> str:
    return f"{seconds:g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:g}ms"


Duration = Annotated[float, BeforeValidator(_duration_before), PlainSerializer(_duration_out, return_type=str)]
"""Seconds; read from and written as text with a unit."""


def _tokens_before(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


Tokens = Annotated[int, BeforeValidator(_tokens_before)]
"""A number of tokens, which may be written as a size."""


def _range_before(value: Any) -> Any:
    value = _tokens_before(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    if isinstance(value, list | tuple):
        value = [_tokens_before(v) for v in value]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) for v in value):
        low, high = value
        if low > high:
            raise ValueError(f"a range goes from low to high: [{high}, {low}]")
        if low < 0:
            raise ValueError("token counts are not negative")
        return (low, high)
    raise ValueError("write a number of tokens, or a pair [low, high] for a uniform range")


def _range_out(value: tuple[int, int]) -> int | list[int]:
    return value[0] if value[0] == value[1] else list(value)


TokenRange = Annotated[tuple[int, int], BeforeValidator(_range_before), PlainSerializer(_range_out)]
"""An inclusive uniform range of token counts; a single number is a range of one."""
