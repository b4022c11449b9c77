"""What `freeze -o` may replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fakes.frozen import frozen_of
from tuner.cli.freeze import write_export
from tuner.errors import UsageError
from tuner.freeze import to_args, to_json, to_yaml


@pytest.mark.parametrize("export", [to_args, to_json, to_yaml])
def test_its_own_exports_are_replaced(tmp_path: Path, export: object) -> None:
    path = tmp_path / "out"
    path.write_text(export(frozen_of()))  # type: ignore[operator]
    write_export(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("text", ["we serve customers well\n", "a serve b --c\nsecond line\n"])
def test_somebody_s_notes_are_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match="was not written by chunktune"):
        write_export(path, "new")
    assert path.read_text() == text


def test_a_pipe_is_written_to_and_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_export(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


def test_a_full_device_is_said_so() -> None:
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left"):
        write_export(Path("/dev/full"), "new")
