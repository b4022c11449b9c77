"""What a killed tuner left running: recorded at the start of each engine, ended by the next run."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.engine.processes import ORPHAN_WAIT_S, Family, ProcessId, alive, boot_id, end_family, identify
from tuner.errors import ChunktuneError, FileFormatError
from tuner.files import read_json, write_json

_SCHEMA = "chunktune.engine/1"


@dataclass(frozen=True, slots=True)
class Record:
    """One engine that was started: who it is, and who started it."""

    path: Path
    engine: ProcessId
    owner: ProcessId
    boot: str

    def remove(self) -> None:
        """The engine is gone, or it is nobody's business any more."""
        self.path.unlink(missing_ok=True)


def record(record_dir: Path, engine: ProcessId) -> Record:
    """Write down an engine that this process has started."""
    owner = identify(os.getpid())
    if owner is None:
        raise ChunktuneError("this process cannot see itself in /proc, which has to be mounted")
    made = Record(record_dir / f"engine-{engine.pid}-{engine.start_ticks}.json", engine, owner, boot_id())
    write_json(made.path, {"schema": _SCHEMA, "engine": asdict(engine), "owner": asdict(owner), "boot_id": made.boot})
    return made


async def end_leftovers(record_dir: Path, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """End the engines recorded in `record_dir` whose tuner is gone; a sentence about each.

    Nothing else is touched: not the engine of a tuner that still runs, not a process that got the same pid
    later, not what was started before the last boot. What is left of an engine is looked for in its
    session too, because its first process may have died before its workers.
    """
    said = []
    for path in _records(record_dir):
        try:
            found = _read(path)
        except FileFormatError as error:
            said.append(f"{error.message}; left as it is")
            continue
        if found.boot == boot_id():
            if alive(found.owner):
                continue
            said += await _end(found, clock)
        found.remove()
    _remove_live_folders(record_dir)
    return said


def _remove_live_folders(record_dir: Path) -> None:
    """Folders of live control whose tuner is gone; its pid is in the name."""
    for folder in record_dir.glob("live-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and identify(int(owner)) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _records(record_dir: Path) -> list[Path]:
    return sorted(record_dir.glob("engine-*.json")) if record_dir.is_dir() else []


async def _end(found: Record, clock: Clock) -> list[str]:
    now = identify(found.engine.pid)
    if now is not None and now != found.engine:
        return []  # The pid is somebody else's today, so the session of that number is theirs as well.
    family = Family(found.engine)
    living = family.refresh()
    if not living:
        return []
    pids = ", ".join(str(p.pid) for p in living)
    left = await end_family(family, clock=clock, term_wait_s=ORPHAN_WAIT_S)
    if left:
        return [
            f"an engine of a killed run is still there and could not be ended: {', '.join(str(p.pid) for p in left)}"
        ]
    return [f"ended an engine that a killed run had left behind (pid {pids})"]


def _read(path: Path) -> Record:
    value = read_json(path, schema=_SCHEMA)
    try:
        return Record(path, ProcessId(**value["engine"]), ProcessId(**value["owner"]), str(value["boot_id"]))
    except (KeyError, TypeError):
        raise FileFormatError(f"{path} is damaged") from None
