"""Optuna's storage of a study: a journal file that a kill cannot leave locked or cut in half."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend

from tuner.errors import FileFormatError, UsageError

_LOCK_SUFFIX = ".lock"


def open_storage(journal: Path, url: str | None) -> optuna.storages.BaseStorage:
    """The journal file, or the storage at `url`. The caller holds the study's own lock.

    That lock makes a journal lock left behind a dead one: it goes at once, where Optuna would wait
    for its grace period of 30 s. A last line that a kill cut off goes too, or the next one would be
    glued to it.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if url is not None:
        try:
            return optuna.storages.get_storage(url)
        except Exception as error:
            raise UsageError(f"--storage {url.split('@')[-1]!r} cannot be opened: {type(error).__name__}") from None
    Path(f"{journal}{_LOCK_SUFFIX}").unlink(missing_ok=True)
    _drop_cut_off_line(journal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        except Exception as error:
            raise FileFormatError(f"{journal} is damaged: {error}", "Start over with --fresh.") from None


def _drop_cut_off_line(journal: Path) -> None:
    if not journal.exists():
        return
    data = journal.read_bytes()
    if data and not data.endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)
