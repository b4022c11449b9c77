"""Where output goes: closed, full or gone, it is never a bug of ours, and JSON stays JSON."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tuner.cli.boundary import with_exit_code

CHUNKTUNE = [sys.executable, "-m", "tuner"]
DRY = [*CHUNKTUNE, "sweep", "quick", "--engine", "sim", "--dry-run"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_bug(tmp_path: Path, closed: str) -> None:
    command = [*CHUNKTUNE, "doctor", "quick", "--engine", "sim", "--out", str(tmp_path)]
    done = subprocess.run(["bash", "-c", f'"$@" {closed}', "-", *command], capture_output=True, timeout=60)
    assert done.returncode in (0, 3), done.stderr


@pytest.mark.parametrize("command", [DRY, [*CHUNKTUNE, "--help"]])
def test_a_full_disk_is_said(command: list[str]) -> None:
    done = subprocess.run(["bash", "-c", '"$@" >/dev/full', "-", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("gone", ["stdout", "stderr"])
@pytest.mark.parametrize("command", [DRY, [*CHUNKTUNE, "--help"]])
def test_a_reader_that_left_is_no_failure(command: list[str], gone: str) -> None:
    """As with `| head`: the other stream still has everything."""
    other = {"stdout": "stderr", "stderr": "stdout"}[gone]
    whole = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(command, **{gone: write_end, other: subprocess.PIPE}, text=True, timeout=60)  # type: ignore[call-overload]
    finally:
        os.close(write_end)
    assert done.returncode == 0
    assert getattr(done, other) == getattr(whole, other)


def test_a_full_disk_behind_stderr_costs_no_answer() -> None:
    done = subprocess.run(["bash", "-c", '"$@" 2>/dev/full', "-", *DRY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "# search: stock" in done.stdout


def test_a_removed_current_folder_is_said(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    script = f'cd "{there}" && rmdir "{there}" && "$@"'
    command = ["bash", "-c", script, "-", *CHUNKTUNE, "doctor", "quick", "--engine", "sim"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "the current folder was removed" in done.stderr


def test_a_dry_run_as_json() -> None:
    done = subprocess.run([*DRY, "--json"], capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    [start] = found["starts"]
    assert start["settings"][0] == "stock"
    assert "serve" in start["command"]
    assert found["expected"]["starts"] > 1
    assert 0 < found["expected"]["low_s"] < found["expected"]["high_s"]


def test_a_name_too_long_for_the_file_system_is_said() -> None:
    command = [*CHUNKTUNE, "report", "x" * 300]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "too long" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    command = [*CHUNKTUNE, "bench", str(tmp_path / "closed" / "profile.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EACCES])
def test_what_a_file_system_refuses_is_no_bug(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> int:
        raise OSError(number, os.strerror(number), "some/place")

    with pytest.raises(typer.Exit) as caught:
        with_exit_code(refused)()
    assert caught.value.exit_code == 2
    assert f"some/place: {os.strerror(number)}" in capsys.readouterr().err
