"""Workload files: JSON lines, with errors that name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tuner.errors import FileFormatError


def read_lines(path: str, base_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is not blank; relative paths begin at `base_dir`."""
    file = Path(path).expanduser()
    file = file if file.is_absolute() else base_dir / file
    try:
        data = file.read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"workload.path: {file} cannot be read: {error.strerror}",
            "A relative path begins in the folder of the profile.",
        ) from None
    found: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FileFormatError(f"{file}, line {number}: no JSON: {error}") from None
        if not isinstance(value, dict):
            raise FileFormatError(f"{file}, line {number}: no JSON object")
        found.append((number, value))
    if not found:
        raise FileFormatError(f"{file} has no lines", "Put one JSON object on each line.")
    return found
