"""Every error that chunktune raises on purpose, one tree.

    ChunktuneError                  exit  what it means
    |-- UsageError                  2     wrong usage, profile or file: the user can fix it
    |   |-- ProfileError            2     the profile, with the line and the nearest known key
    |   `-- FileFormatError         2     a file that is unreadable, foreign or of another version
    |-- EngineError                 3     the engine or the hardware failed; carries a Diagnosis
    |-- LoadError                   3     a round could not be driven (server refused, cut, stalled)
    |-- NoVerdict                   4     inconclusive, or no candidate meets the constraints
    `-- Interrupted                 130   SIGINT or SIGTERM; the hint says what is kept

Only `tuner.cli` turns these into exit codes. Anything else that escapes is a bug (exit 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.domain.experiment import Diagnosis


class ChunktuneError(Exception):
    """Base of the tree. `message` says what is wrong, `hint` the next step (may be empty)."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(ChunktuneError):
    """Wrong usage: a flag, a name, a path, a combination."""

    exit_code = 2


class ProfileError(UsageError):
    """The profile is wrong; the message names the field and, where known, the line."""


class FileFormatError(UsageError):
    """A file of ours is unreadable, somebody else's, or of another schema version."""


class EngineError(ChunktuneError):
    """The engine or the hardware failed. `diagnosis.code` is one of the stable cause codes."""

    exit_code = 3

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.message, diagnosis.hint)
        self.diagnosis = diagnosis


class LoadError(ChunktuneError):
    """The load could not be driven against a server that is up. `code` is a stable cause code."""

    exit_code = 3

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = code


class NoVerdict(ChunktuneError):
    """Nothing can be said: inconclusive, or no candidate meets the constraints."""

    exit_code = 4


class Interrupted(ChunktuneError):
    """SIGINT or SIGTERM arrived and the work has stopped; `hint` says what of it is kept."""

    exit_code = 130
