"""Every command of README and docs that needs no GPU is run, in order, page by page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import command_blocks, pages

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
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -1, f"{output}\n(not done after {LIMIT_S} s)"
    return process.returncode, output


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda p: p.name)
def test_commands_do_what_the_page_says(page: Path, workplace: Path) -> None:
    blocks = command_blocks(page.read_text(encoding="utf-8"))
    runnable = [b for b in blocks if not b.skip]
    if not runnable:
        pytest.skip(f"no command to run: {'; '.join(sorted({b.skip for b in blocks})) or 'no commands'}")
    for block in runnable:
        code, output = run(block.script, workplace)
        assert code == block.exits, f"{page.name}, line {block.line}: exit {code}\n{block.script}\n\n{output[-3000:]}"
