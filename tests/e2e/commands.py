"""The command as a process, what it wrote, and what it left running."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAKE_VLLM = shlex.join([sys.executable, str(Path(__file__).parents[1] / "fakes" / "fake_vllm.py")])
"""By our own Python: a `python3` on PATH may be a shim that takes long."""
DEADLINE_S = 180.0
MARK = "CHUNKTUNE_TEST_MARK"
"""Stands in the environment of everything that a command of `cwd` starts."""

Done = subprocess.CompletedProcess[str]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tuner", *map(str, words)]


def environment(cwd: Path, script: dict[str, Any] | None, env: dict[str, str]) -> dict[str, str]:
    """`script` is the fake vLLM's; its state (how often it was started) is kept in `cwd`."""
    fake = {} if script is None else {"FAKE_VLLM": json.dumps({"state": str(cwd / "state"), **script})}
    return {**os.environ, MARK: str(cwd), **fake, **env}


def run(*words: object, cwd: Path, script: dict[str, Any] | None = None, **env: str) -> Done:
    """`chunktune WORDS` in `cwd`, to its end."""
    return subprocess.run(
        command(*words),
        cwd=cwd,
        env=environment(cwd, script, env),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@contextmanager
def running(
    *words: object, cwd: Path, script: dict[str, Any] | None = None, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """`chunktune WORDS` in `cwd` while the block runs; killed at its end where it still lives."""
    with subprocess.Popen(
        command(*words),
        cwd=cwd,
        env=environment(cwd, script, env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def starts(study: Path) -> list[dict[str, Any]]:
    """Every `start.json`, in order."""
    return [json.loads(f.read_text()) for f in sorted(study.glob("starts/*/start.json"))]


def rounds(study: Path, *, kept: bool = True) -> list[dict[str, Any]]:
    """The rows of `rounds.jsonl`; those that count, unless told otherwise."""
    file = study / "rounds.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in rows if row["state"] == "kept"] if kept else rows


def document(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def launches(cwd: Path) -> int:
    """How often the fake vLLM was started."""
    counted = cwd / "state" / "starts"
    return counted.stat().st_size if counted.exists() else 0


def alive(cwd: Path) -> list[int]:
    """Pids of living processes that a command of `cwd` started."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes() if entry.isdigit() else b""
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0] if environ else "X"
        except OSError:
            continue
        if f"{MARK}={cwd}\0".encode() in environ and state not in "ZX":
            found.append(int(entry))
    return found


def wait_until(
    condition: Callable[[], object], wait_s: float = 60.0, *, child: subprocess.Popen[str] | None = None
) -> None:
    """Look until it holds; AssertionError when it does not come to that in time, or `child` ends before."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        assert child is None or child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        time.sleep(0.02)
