"""Documents are written whole, and only files are replaced."""

import errno
import os
from pathlib import Path

import pytest

from tuner.errors import FileFormatError
from tuner.files import append_json_line, read_json, read_json_lines, renew_json, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "below" / "document"
    write_whole(path, b"old")
    with path.open("rb") as reader:
        write_whole(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to("document")
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "document").read_bytes() == b"new"


def test_a_pipe_or_device_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_file_without_an_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.files.LARGEST_FILE_BYTES", 1000)
    with pytest.raises(FileFormatError, match="/dev/zero is larger than any file"):
        read_json(Path("/dev/zero"))


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(tmp_path / "summary.json", b"{}")
    assert caught.value.filename == str(tmp_path / "summary.json")
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_says_the_same_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    renew_json(path, {"at": 1, "value": 0.1})
    os.utime(path, ns=(1, 1))
    renew_json(path, {"value": 0.1, "at": 2}, but=("at",))
    assert path.stat().st_mtime_ns == 1
    renew_json(path, {"at": 2, "value": 0.2}, but=("at",))
    assert read_json(path) == {"at": 2, "value": 0.2}


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]"])
def test_a_damaged_document_is_written_again(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(damaged)
    renew_json(path, {"value": 1})
    assert read_json(path) == {"value": 1}


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        (b"", []),
        (b'{"row": 1}\n', [1]),
        (b'{"row": 1}\n{"row": 2, "val', [1]),
        (b'{"row": 1}\n{"row": 2}', [1, 2]),
        (b'{"ro', []),
    ],
    ids=["empty", "whole", "cut off", "without its newline", "nothing but cut off"],
)
def test_a_line_goes_behind_the_last_whole_one(tmp_path: Path, there: bytes, kept: list[int]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(there)
    assert [row["row"] for row in read_json_lines(path)] == kept
    append_json_line(path, {"row": 9})
    append_json_line(path, {"row": 10})
    assert [row["row"] for row in read_json_lines(path)] == [*kept, 9, 10]
