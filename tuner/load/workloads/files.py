"""Workload files: JSON lines, with errors that name the line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tuner.errors import FileFormatError


def read_lines(path: str, base_dir: Path, known: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Where it stands, and the object of each line that is not blank; relative paths begin at `base_dir`.

    FileFormatError for a key that is nearly one of `known` in a line that lacks that one.
    """
    file = Path(path).expanduser()
    file = file if file.is_absolute() else base_dir / file
    try:
        data = file.read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"workload.path: {file} cannot be read: {error.strerror}",
            "A relative path begins in the folder of the profile.",
        ) from None
    found: list[tuple[str, dict[str, Any]]] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FileFormatError(f"{where}: no JSON: {error}", "Put one JSON object on each line.") from None
        if not isinstance(value, dict):
            raise FileFormatError(f"{where}: no JSON object", "Put one JSON object on each line.")
        for key in value.keys() - set(known):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
            if near and near[0] not in value:
                raise FileFormatError(f"{where}: unknown key {key!r}", f"Did you mean {near[0]!r}?")
        found.append((where, value))
    if not found:
        raise FileFormatError(f"{file} has no lines", "Put one JSON object on each line.")
    return found
