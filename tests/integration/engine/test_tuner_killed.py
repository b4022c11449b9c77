"""The tuner itself is ended by a signal: orderly where it can be, by the next run where it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.conftest import FAKE
from tuner.engine.leftovers import end_leftovers, record
from tuner.engine.processes import identify

LeftOver = Callable[[], list[int]]
TUNER = Path(__file__).with_name("tuner_process.py")


@contextmanager
def running_tuner(folder: Path, **script: Any) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    given = json.dumps({"fake": str(FAKE), "folder": str(folder), "script": script})
    with subprocess.Popen([sys.executable, str(TUNER), given], stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        try:
            yield tuner, json.loads(tuner.stdout.readline())["pids"]
        finally:
            tuner.kill()


def wait_until(condition: Callable[[], bool], wait_s: float = 10.0) -> bool:
    end_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("signals", [1, 2])
def test_sigint(tmp_path: Path, left_over: LeftOver, signals: int) -> None:
    """Also when an impatient user presses Ctrl-C again during the orderly end."""
    with running_tuner(tmp_path, core="stubborn", ignore_term=True) as (tuner, _):
        for _ in range(signals):
            tuner.send_signal(signal.SIGINT)
            time.sleep(0.2)
        tuner.wait(timeout=20)
    assert left_over() == []


def test_sigkill_of_the_tuner_ends_a_healthy_engine_at_once(tmp_path: Path, left_over: LeftOver) -> None:
    with running_tuner(tmp_path) as (tuner, _):
        tuner.kill()
        assert wait_until(lambda: left_over() == [])


async def test_sigkill_of_the_tuner_and_a_stubborn_engine_is_ended_by_the_next_run(
    tmp_path: Path, left_over: LeftOver
) -> None:
    with running_tuner(tmp_path, core="stubborn", ignore_term=True) as (tuner, pids):
        assert await end_leftovers(tmp_path / "records") == []  # its tuner is alive: not ours to end
        tuner.kill()
        tuner.wait()
        time.sleep(0.3)
        assert sorted(left_over()) == sorted(pids)
        said = await end_leftovers(tmp_path / "records")
    assert len(said) == 1
    assert all(str(pid) in said[0] for pid in pids)
    assert left_over() == []
    assert list((tmp_path / "records").glob("engine-*")) == []


async def test_workers_whose_first_process_is_gone_are_found(tmp_path: Path, left_over: LeftOver) -> None:
    """The parent-death signal ends the API server; its engine process ignores SIGTERM and holds the GPU."""
    with running_tuner(tmp_path, core="stubborn") as (tuner, pids):
        tuner.kill()
        tuner.wait()
        assert wait_until(lambda: len(left_over()) == 1)
        said = await end_leftovers(tmp_path / "records")
    assert len(said) == 1
    assert str(pids[1]) in said[0]
    assert left_over() == []


@pytest.mark.parametrize("change", ["start_ticks", "boot_id"])
async def test_a_process_that_got_the_pid_later_is_not_touched(tmp_path: Path, change: str) -> None:
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as stranger:
        try:
            identity = identify(stranger.pid)
            assert identity is not None
            path = record(tmp_path, identity).path
            value = json.loads(path.read_text())
            value["owner"]["start_ticks"] -= 1  # its tuner is gone
            if change == "boot_id":
                value["boot_id"] = "another boot"
            else:
                value["engine"]["start_ticks"] -= 1
            path.write_text(json.dumps(value))
            assert await end_leftovers(tmp_path) == []
            assert stranger.poll() is None
            assert not path.exists()
        finally:
            stranger.kill()


async def test_folders_of_live_control_go_with_their_tuner(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, theirs = tmp_path / f"live-{os.getpid()}-aa", tmp_path / f"live-{gone.pid}-bb"
    mine.mkdir()
    theirs.mkdir()
    await end_leftovers(tmp_path)
    assert mine.is_dir()
    assert not theirs.exists()


async def test_a_damaged_record_is_said_and_left(tmp_path: Path) -> None:
    path = tmp_path / "engine-1-1.json"
    path.write_text('{"schema": "chunktune.engine/1", "engine": 3}')
    said = await end_leftovers(tmp_path)
    assert len(said) == 1
    assert "damaged" in said[0]
    assert path.exists()
