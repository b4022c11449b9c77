"""Messages by way of a folder that nobody but the tuner's user can read or write. Standard library only.

The tuner writes `command.json`, each engine `report-<engine>.json`. Files are written whole and carry mode 0600.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tuner.scheduler.handles import LiveHandleError
from tuner.scheduler.messages import FOLDER_VARIABLE, Command, MessageError, Report

logger = logging.getLogger("vllm.chunktune")

_COMMAND: Final = "command.json"
_LARGEST_BYTES: Final = 1 << 16
_OURS_ONLY: Final = 0o077


def make_folder(path: Path) -> Path:
    """A new folder for one engine start. MessageError where the file system does not keep others out of it."""
    path.mkdir(mode=0o700)
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """MessageError unless it is a folder of this user that nobody else can enter."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise MessageError(f"the folder {path} for live control cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise MessageError(f"{path} for live control is not a folder")
    _check_private(found, f"the folder {path} for live control")


def write_command(folder: Path, command: Command) -> None:
    """Give a command to every engine of the folder; their reports on earlier ones are removed first."""
    for path in folder.glob("report-*.json"):
        path.unlink(missing_ok=True)
    _write(folder / _COMMAND, command.to_json())


def read_report(folder: Path, engine: int) -> Report | None:
    """What this engine has answered; None while there is no answer. MessageError for one that is not to be trusted."""
    try:
        return Report.from_json(_read(folder / f"report-{engine}.json")[0])
    except FileNotFoundError:
        return None


class FolderChannel:
    """The engine's end. To look for a command costs one `os.stat` while there is no new one."""

    def __init__(self, folder: Path, engine: int) -> None:
        """MessageError when the folder is not private."""
        check_folder(folder)
        self._folder = folder
        self._command = os.path.join(folder, _COMMAND)
        self._report = folder / f"report-{engine}.json"
        self._taken: tuple[int, int] | None = None

    def take(self) -> Command | None:
        try:
            mark = _mark(os.stat(self._command, follow_symlinks=False))
        except OSError:
            return None
        if mark == self._taken:
            return None
        self._taken = mark
        check_folder(self._folder)
        try:
            data, self._taken = _read(Path(self._command))
        except FileNotFoundError:
            return None
        return Command.from_json(data)

    def put(self, report: Report) -> None:
        try:
            _write(self._report, report.to_json())
        except OSError as error:
            logger.warning("chunktune: a report of live control is lost: %s", error)


def channel_of(environment: Mapping[str, str], engine: int) -> FolderChannel:
    """The channel of an engine that is starting. LiveHandleError when its folder is not there or not private."""
    folder = environment.get(FOLDER_VARIABLE)
    if not folder:
        raise LiveHandleError(f"the environment variable {FOLDER_VARIABLE} is not set")
    try:
        return FolderChannel(Path(folder), engine)
    except MessageError as error:
        raise LiveHandleError(str(error)) from None


def _mark(found: os.stat_result) -> tuple[int, int]:
    """Differs between two files that were put in the same place one after the other."""
    return found.st_mtime_ns, found.st_ino


def _read(path: Path) -> tuple[bytes, tuple[int, int]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise MessageError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MessageError(f"{path} is not a plain file")
        _check_private(found, str(path))
        data = file.read(_LARGEST_BYTES + 1)
    if len(data) > _LARGEST_BYTES:
        raise MessageError(f"{path} is larger than {_LARGEST_BYTES} bytes")
    return data, _mark(found)


def _check_private(found: os.stat_result, what: str) -> None:
    if found.st_uid != os.geteuid():
        raise MessageError(f"{what} belongs to user {found.st_uid}, this process runs as {os.geteuid()}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OURS_ONLY:
        raise MessageError(f"{what} has mode {mode:04o}, which lets others in")


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
