"""Every command of README and docs that needs no GPU is run, in order, page by page."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.docs.commands import PORT, command_blocks, pages
from tuner.engine.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder that looks like the repository: the same files beside, results of its own."""
    for name in ("profiles", "benchmarks", "docs", "tests", "tuner", "README.md"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(script: str, cwd: Path) -> tuple[int, str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=cwd,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code, remark = process.wait(timeout=LIMIT_S), ""
        except subprocess.TimeoutExpired:
            code, remark = -1, f"\n(not done after {LIMIT_S} s)"
        finally:
            # Also a server that a block left behind, because a command after it failed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
        output.seek(0)
        return code, output.read() + remark


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda p: p.name)
def test_commands_do_what_the_page_says(page: Path, workplace: Path) -> None:
    blocks = command_blocks(page.read_text(encoding="utf-8"))
    runnable = [b for b in blocks if not b.skip]
    if not runnable:
        pytest.skip(f"no command to run: {'; '.join(sorted({b.skip for b in blocks})) or 'no commands'}")
    for block in runnable:
        code, output = run(block.script.replace(PORT, str(free_port())), workplace)
        assert code == block.exits, f"{page.name}, line {block.line}: exit {code}\n{block.script}\n\n{output[-3000:]}"
