"""Optuna's storage of a study: opened for a moment, tried again while it is locked or away, never trusted to stay."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tuner.clock import Clock
from tuner.domain.experiment import Diagnosis
from tuner.errors import EngineError, FileFormatError, UsageError

T = TypeVar("T")

RETRY_FOR_S = 30.0
RETRY_EVERY_S = 1.0
_LOCK_SUFFIX = ".lock"
_TRANSIENT = (DBAPIError, optuna.exceptions.StorageInternalError, OSError)
_CAUGHT_UP = "What was measured is in rounds.jsonl; the next run of the same command brings the storage up to date."


@dataclass(frozen=True)
class StorageAddress:
    """The journal in the study's folder, or the storage that the user named."""

    journal: Path
    url: str | None = None

    def __str__(self) -> str:
        """Without user and password."""
        return str(self.journal) if self.url is None else self.url.rpartition("@")[2]


class StorageAway(Exception):
    """A locked or unreachable storage; `missing` where its file or folder is not there. Another attempt may succeed."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.missing = missing


async def patiently(
    action: Callable[[], T],
    address: StorageAddress,
    clock: Clock,
    *,
    retry_for_s: float = RETRY_FOR_S,
    wait_for_missing: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> T:
    """The action's result, in a thread of its own, tried again while the storage is away.

    StorageAway when it still is after `retry_for_s`, or at once where it is missing and nobody waits for that.
    `say` hears of the first failure.
    """
    began_s = clock.monotonic_s()
    told = False
    while True:
        try:
            return await asyncio.to_thread(action)
        except StorageAway as away:
            late = clock.monotonic_s() - began_s + RETRY_EVERY_S > retry_for_s
            if late or (away.missing and not wait_for_missing):
                raise
            if not told:
                say(f"{away}; trying again for {retry_for_s:g} s")
                told = True
        await clock.sleep(RETRY_EVERY_S)


@contextmanager
def opened(address: StorageAddress) -> Iterator[optuna.storages.BaseStorage]:
    """The storage, for one batch of reads and writes. The caller holds the study's own lock.

    StorageAway while it is locked or unreachable, inside the block too; UsageError and FileFormatError where another
    attempt would change nothing.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage: optuna.storages.BaseStorage | None = None
    try:
        storage = _journal(address.journal) if address.url is None else _database(address, address.url)
        yield storage
    except _TRANSIENT as error:
        said = _short(error, address)
        missing = "unable to open database file" in said
        raise StorageAway(f"the Optuna storage {address} cannot be used now ({said})", missing=missing) from None
    except JSONDecodeError:
        where = address.journal if address.url is None else address
        raise FileFormatError(f"{where} is damaged", "Delete it: it is written anew from rounds.jsonl.") from None
    except RuntimeError as error:
        # What Optuna says when its lock file was taken away, together with the study's folder for example.
        if "did not possess lock" not in str(error):
            raise
        raise StorageAway(f"the Optuna storage {address} was removed while it was written", missing=True) from None
    finally:
        if isinstance(storage, optuna.storages.RDBStorage):
            storage.remove_session()
            storage.engine.dispose()


def given_up(away: StorageAway, *, before_start: bool) -> UsageError | EngineError:
    """The error that ends a sweep for a storage that stayed away: wrong usage before anything was measured."""
    if before_start:
        return UsageError(str(away), "Check --storage, or leave it out: the study then keeps a journal.log of its own.")
    return EngineError(Diagnosis(code="storage_unavailable", message=str(away), hint=_CAUGHT_UP))


def _database(address: StorageAddress, url: str) -> optuna.storages.BaseStorage:
    try:
        return optuna.storages.RDBStorage(url)
    except _TRANSIENT:
        raise
    except (SQLAlchemyError, ImportError, ValueError, TypeError, RuntimeError) as error:
        raise _unusable(address, error) from None


def _unusable(address: StorageAddress, error: Exception) -> UsageError:
    return UsageError(
        f"--storage {str(address)!r} cannot be opened: {_short(error, address)}",
        "Give a URL such as sqlite:///study.db, or leave it out.",
    )


def _journal(journal: Path) -> optuna.storages.BaseStorage:
    """The study's own lock makes a journal lock left behind a dead one: it goes at once, where Optuna would wait for
    its grace period of 30 s. A last line that a kill cut off goes too, or the next one would be glued to it."""
    Path(f"{journal}{_LOCK_SUFFIX}").unlink(missing_ok=True)
    _drop_cut_off_line(journal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        except OSError:
            raise
        except Exception as error:
            raise FileFormatError(f"{journal} is damaged: {error}", "Start over with --fresh.") from None


def _drop_cut_off_line(journal: Path) -> None:
    if not journal.exists():
        return
    data = journal.read_bytes()
    if data and not data.endswith(b"\n"):
        with journal.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _short(error: BaseException, address: StorageAddress) -> str:
    """The error without what it may tell of a database's user: its kind, for a file what it says too."""
    name = type(error).__name__
    local = address.url is None or address.url.startswith("sqlite")
    said = str(getattr(error, "orig", None) or error.__cause__ or error) if local else ""
    return f"{name}: {said.splitlines()[0]}" if said else name
