"""The processes of one engine: found by the kernel's own records, ended in bounded time. Linux.

An engine is started as the leader of a session of its own. Its processes are those of that session and the
descendants of those already seen, each known by pid and start time, so that a recycled pid is never touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tuner.clock import SYSTEM_CLOCK, Clock

TERM_WAIT_S = 15.0
"""A healthy CPU server ends 2 to 3 s after SIGTERM; a GPU has more to put away."""
KILL_WAIT_S = 10.0
ORPHAN_WAIT_S = 5.0
"""Once the root is gone nobody is left to put anything away in order."""
_TICK_S = 0.02
_SLOWEST_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for all time: its pid, and when it started in clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class _Stat:
    id: ProcessId
    name: str
    state: str
    parent: int
    session: int

    @property
    def dead(self) -> bool:
        return self.state in "ZX"


def boot_id() -> str:
    """The kernel's name for this boot: start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none, or only a zombie."""
    stat = _stat(pid)
    return None if stat is None or stat.dead else stat.id


def name_of(process: ProcessId) -> str | None:
    """The process's name, at most 15 characters (the kernel's limit); None when it is gone."""
    stat = _stat(process.pid)
    return stat.name if stat is not None and stat.id == process and not stat.dead else None


def alive(process: ProcessId) -> bool:
    """True while that very process runs; a zombie does not."""
    return identify(process.pid) == process


class Family:
    """Every process of one engine that was ever seen, and those alive now."""

    def __init__(self, root: ProcessId) -> None:
        self.root = root
        self._seen: set[ProcessId] = {root}

    def refresh(self) -> list[ProcessId]:
        """Those alive now, the root first; newcomers are remembered."""
        table = _table()
        members = {p for p in self._seen if (s := table.get(p.pid)) is not None and s.id == p}
        # The kernel keeps a session's number from being used again while anybody is in it, and whoever
        # is in it later than the root can only have inherited it.
        members |= {
            s.id for s in table.values() if s.session == self.root.pid and s.id.start_ticks >= self.root.start_ticks
        }
        children: dict[int, list[_Stat]] = {}
        for stat in table.values():
            children.setdefault(stat.parent, []).append(stat)
        todo = list(members)
        while todo:
            for child in children.get(todo.pop().pid, []):
                if child.id not in members:
                    members.add(child.id)
                    todo.append(child.id)
        self._seen |= members
        living = [p for p in members if not table[p.pid].dead]
        return sorted(living, key=lambda p: (p != self.root, p.start_ticks, p.pid))


async def end_family(
    family: Family,
    *,
    reap: Callable[[], object] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
    term_wait_s: float = TERM_WAIT_S,
    kill_wait_s: float = KILL_WAIT_S,
) -> list[ProcessId]:
    """TERM to all, a bounded wait, KILL to all, a bounded wait. Returns who is still alive: nobody, normally.

    `reap` is called at each look, to collect the exit code of a child of ours. A cancellation in the
    middle kills what is left before it is passed on.
    """
    try:
        await _until_gone(family, signal.SIGTERM, term_wait_s, reap, clock)
        return await _until_gone(family, signal.SIGKILL, kill_wait_s, reap, clock)
    except BaseException:
        kill_family(family, reap=reap)
        raise


def kill_family(family: Family, *, reap: Callable[[], object] = lambda: None, wait_s: float = 2.0) -> None:
    """KILL to all without an event loop, with a short wait: the way out when there is no time to be orderly."""
    deadline = SYSTEM_CLOCK.monotonic_s() + wait_s
    while (living := family.refresh()) and SYSTEM_CLOCK.monotonic_s() < deadline:
        _send(living, signal.SIGKILL)
        reap()
        time.sleep(_TICK_S)
    reap()


async def _until_gone(
    family: Family, number: signal.Signals, wait_s: float, reap: Callable[[], object], clock: Clock
) -> list[ProcessId]:
    deadline = clock.monotonic_s() + wait_s
    told: set[ProcessId] = set()
    orphaned = False
    tick = _TICK_S
    while True:
        reap()
        living = family.refresh()
        if not living:
            reap()
            return []
        # A second SIGTERM can cut an orderly end short; a second SIGKILL is for those that forked meanwhile.
        fresh = [p for p in living if p not in told]
        _send(fresh, number)
        told.update(fresh)
        now = clock.monotonic_s()
        if family.root not in living:
            deadline = min(deadline, now + ORPHAN_WAIT_S) if not orphaned else deadline
            orphaned = True
        if now >= deadline:
            return living
        await clock.sleep(tick)
        tick = min(tick * 1.5, _SLOWEST_TICK_S)


def _send(processes: Iterable[ProcessId], number: signal.Signals) -> None:
    for process in processes:
        # Looked at again right before the signal: its pid may have gone to somebody else since it was listed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if alive(process):
                os.kill(process.pid, number)


def _table() -> dict[int, _Stat]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            found[stat.id.pid] = stat
    return found


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in brackets and may hold any character, brackets included.
    head, _, rest = text.rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return _Stat(
        ProcessId(pid, int(fields[19])),
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
    )
