"""Engines of the fake `vllm`, and a look at what is left of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.engine.launch import LaunchSpec

FAKE = Path(__file__).parents[2] / "fakes" / "fake_vllm.py"
MakeSpec = Callable[..., LaunchSpec]


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    """A spec of a fake engine; keyword arguments are the fake's script, `args` and a few more the spec's."""

    def make(
        *,
        args: dict[str, Any] | None = None,
        timeout_s: float = 20.0,
        term_wait_s: float = 0.4,
        launcher: tuple[str, ...] = (sys.executable, str(FAKE)),
        **script: Any,
    ) -> LaunchSpec:
        return LaunchSpec(
            launcher=launcher,
            kind="vllm",
            model="fake/model",
            args={"max_num_batched_tokens": 512} if args is None else args,
            env={"FAKE_VLLM": json.dumps(script)},
            log_path=tmp_path / "start" / "engine.log",
            startup_timeout_s=timeout_s,
            record_dir=tmp_path / "records",
            term_wait_s=term_wait_s,
        )

    return make


def marked(mark: Path) -> list[int]:
    """Pids of living processes whose environment names this folder: all that a test has started."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(mark).encode() in environ and state not in "ZX":
            found.append(int(entry))
    return found


@pytest.fixture
def left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """What is alive of all that this test has started."""
    monkeypatch.setenv("CHUNKTUNE_TEST_MARK", str(tmp_path))
    return lambda: marked(tmp_path)
