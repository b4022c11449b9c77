"""`vllm serve` options as values and as argv, both ways. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.domain.setting import Scalar

_INT = re.compile(r"[-+]?\d+\Z")
_FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?\Z")


def option_name(key: str) -> str:
    """`max_num_seqs` as vLLM writes it on a command line: `--max-num-seqs`."""
    return "--" + key.replace("_", "-")


def to_argv(args: Mapping[str, Any]) -> list[str]:
    """True is `--flag`, False `--no-flag`, None is left out; dicts and lists become JSON.

    A value that begins with a dash is joined with `=`, so that it is not read as an option.
    """
    argv: list[str] = []
    for key, value in args.items():
        if value is None:
            continue
        if value is True:
            argv.append(option_name(key))
        elif value is False:
            argv.append(option_name(f"no_{key}"))
        else:
            text = _text(value)
            argv += [f"{option_name(key)}={text}"] if not text or text.startswith("-") else [option_name(key), text]
    return argv


def from_argv(argv: Sequence[str]) -> dict[str, Scalar]:
    """The options of an argv that `to_argv` could have written; the last of equal ones wins.

    ValueError for a word that is neither an option nor an option's value.
    """
    args: dict[str, Scalar] = {}
    words = list(argv)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"{word!r} is no option")
        name, joined, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if joined:
            args[key] = _scalar(value)
        elif at < len(words) and not words[at].startswith("--"):
            args[key] = _scalar(words[at])
            at += 1
        elif key.startswith("no_"):
            args[key.removeprefix("no_")] = False
        else:
            args[key] = True
    return args


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _scalar(text: str) -> Scalar:
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return text
