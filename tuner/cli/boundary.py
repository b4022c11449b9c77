"""The only place where errors become exit codes and messages on stderr."""

from __future__ import annotations

import errno
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from tuner.clock import SYSTEM_CLOCK
from tuner.errors import ChunktuneError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

EXIT_BUG = 1
EXIT_INTERRUPTED = 130

_HINTS = {
    errno.EACCES: "Allow it, or name another place.",
    errno.EPERM: "Allow it, or name another place.",
    errno.EROFS: "Name a place that can be written.",
    errno.EEXIST: "Move it out of the way, or name another place.",
    errno.EISDIR: "Move it out of the way, or name another place.",
    errno.ENOTDIR: "Move it out of the way, or name another place.",
    errno.ENAMETOOLONG: "Take a shorter name.",
    errno.ENOSPC: "Make room, then again.",
    errno.EDQUOT: "Make room, then again.",
}
"""What a file system refuses wherever it is touched: nothing that we did wrong."""


def with_exit_code(command: Callable[..., int]) -> Callable[..., None]:
    """The command as typer wants it: its return value, or the error that it raised, becomes the exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        raise typer.Exit(_exit_code(lambda: command(*args, **kwargs)))

    return run


class _LastingStream(io.FileIO):
    """Standard output or error that outlives its reader: once nobody can read, what is written is dropped.

    Whoever left (`| head`, a closed terminal) must not cost hours of measurement. With `only_pipes` any
    other failure, such as a full disk, is still raised, once.
    """

    def __init__(self, fd: int, *, only_pipes: bool) -> None:
        super().__init__(fd, "w", closefd=False)
        self._only_pipes = only_pipes

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self._only_pipes and not isinstance(error, BrokenPipeError):
                raise
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Give 0, 1 and 2 something to point at where the caller closed them, and let 1 and 2 outlive their readers.

    Else the next file opened would be one of them: an engine's output, or our own, would land in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = _lasting(sys.stdout, 1, only_pipes=True)
    sys.stderr = _lasting(sys.stderr, 2, only_pipes=False)


def _lasting(stream: TextIO | None, fd: int, *, only_pipes: bool) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingStream(fd, only_pipes=only_pipes)),
        encoding=stream.encoding if stream is not None else None,
        errors="replace",  # a locale without a minus sign loses the sign, not the answer
        line_buffering=fd == 2 or (stream is not None and stream.isatty()),
    )


def run_to_exit(command_line: Callable[[], object]) -> NoReturn:
    """Run the whole command line and exit with its code, once what it printed has arrived."""

    def run() -> int:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UsageError("the current folder was removed", "Change into one that exists.") from None
        try:
            command_line()
        except SystemExit as done:
            code = done.code
        else:
            code = 0
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_BUG if code else 0

    sys.exit(_exit_code(run))


def _exit_code(action: Callable[[], int]) -> int:
    try:
        return action()
    except typer.Exit:
        raise
    except ChunktuneError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _HINTS:
            _say(f"error: {_shortened(error.filename)}: {error.strerror}\n  {_HINTS[error.errno]}")
            return UsageError.exit_code
        _say(
            f"error: this is a bug in chunktune: {type(error).__name__}: {error}\n"
            f"  The traceback is in {_write_traceback()}; please report it with that file."
        )
        return EXIT_BUG


def _shortened(name: object) -> str:
    text = "output" if name is None else str(name)
    return text if len(text) <= 200 else f"{text[:60]}..."


def _write_traceback() -> Path:
    path = Path(gettempdir()) / f"chunktune-{os.getpid()}-{SYSTEM_CLOCK.now():%Y%m%dT%H%M%S}.log"
    path.write_text(traceback.format_exc())
    return path


def _say(text: str) -> None:
    from tuner.domain.units import printable

    sys.stderr.write(f"chunktune: {printable(text)}\n")
    sys.stderr.flush()
