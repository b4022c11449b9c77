"""The one door to our files: documents are written whole, logs only grow, strangers are refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tuner.errors import FileFormatError

LARGEST_FILE_BYTES = 2**28
"""Far above any document of ours."""


def dump_json(value: Any) -> bytes:
    """Pretty JSON with a final newline; TypeError for what JSON cannot carry."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` so that a reader sees the old file or the new one, also after a kill or a power cut.

    A link is followed, and a pipe or device is written to: replaced, `/dev/null` would be a plain file
    for the whole machine.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            # A full disk does not say whose file it was.
            error.filename = str(path)
        raise


def refuse_foreign(path: Path, mark: bytes) -> None:
    """FileFormatError before a file is replaced that has something in it, and not `mark` near its start."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(4096)
    if head.strip() and mark not in head:
        raise FileFormatError(f"{path} exists and was not written by chunktune", "Remove it, or name another file.")


def write_json(path: Path, value: Any) -> None:
    """`write_whole` of a JSON document."""
    write_whole(path, dump_json(value))


def renew_json(path: Path, value: Any, *, but: Collection[str] = ()) -> None:
    """`write_json`, unless the file says the same already, its keys in `but` aside."""
    try:
        there, new = orjson.loads(path.read_bytes()), orjson.loads(dump_json(value))
    except (OSError, orjson.JSONDecodeError):
        there = new = None
    same = isinstance(there, dict) and isinstance(new, dict) and _without(there, but) == _without(new, but)
    if not same:
        write_json(path, value)


def _without(value: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if name not in names}


def read_bounded(path: Path) -> bytes:
    """The whole file. FileFormatError above LARGEST_FILE_BYTES: a device such as /dev/zero has no end."""
    with path.open("rb") as file:
        data = file.read(LARGEST_FILE_BYTES + 1)
    if len(data) > LARGEST_FILE_BYTES:
        raise FileFormatError(f"{path} is larger than any file of chunktune's", "Name the right one.")
    return data


def read_json(path: Path, *, schema: str | None = None) -> dict[str, Any]:
    """A JSON object; with `schema`, one of exactly that schema. FileFormatError says what is wrong."""
    try:
        value = orjson.loads(read_bounded(path))
    except FileNotFoundError:
        raise FileFormatError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise FileFormatError(f"{path} is a directory, a file was expected") from None
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise FileFormatError(f"{path} is no JSON: {error}", "It may be cut off or edited; restore it.") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{path} holds no JSON object")
    if schema is not None and value.get("schema") != schema:
        found = value.get("schema")
        family = schema.rpartition("/")[0]
        if isinstance(found, str) and found.rpartition("/")[0] == family:
            raise FileFormatError(
                f"{path} has schema {found!r}, this chunktune reads {schema!r}",
                "Use the chunktune version that wrote it, or make the file again.",
            )
        raise FileFormatError(
            f"{path} is not a {family} file (its schema is {found!r})", "Name the right file, or restore this one."
        )
    return value


def append_json_line(path: Path, value: Any) -> None:
    """Append one line of JSON in a single write; a last line that was cut off by a kill is removed before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _heal_last_line(file)
        file.write(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))


def _heal_last_line(file: BinaryIO) -> None:
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    whole, newline, last = file.read().rpartition(b"\n")
    try:
        orjson.loads(last)
    except orjson.JSONDecodeError:
        file.truncate(len(whole) + len(newline))
    else:
        file.write(b"\n")


def read_json_lines(path: Path) -> Iterable[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut off by a kill is left out."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            if number >= len(lines) - 1:
                return
            raise FileFormatError(f"{path}, line {number}: no JSON") from None
        yield value
