"""A study's folder with damage in it: the file is named, never a traceback."""

import gzip
from pathlib import Path

import pytest

from tuner.errors import FileFormatError
from tuner.experiment.store import StudyDirectory, read_requests, read_telemetry


@pytest.mark.parametrize(
    "data",
    [
        b"",
        gzip.compress(b'{"source": "nvml"}\n' * 50)[:-20],
        gzip.compress(bytes(range(256)), mtime=0)[:12] + b"\xff" * 40,
        gzip.compress(b"[]\n"),
        gzip.compress(b"null\n"),
        gzip.compress(b"{}\n"),
        gzip.compress(b'{"source": "nvml"}\n{"at_s": "x"}\n'),
    ],
    ids=["empty", "cut off", "damaged", "list", "null", "no fields", "wrong type"],
)
def test_a_damaged_round_is_named(tmp_path: Path, data: bytes) -> None:
    folder = StudyDirectory(tmp_path).trial_dir(3)
    folder.mkdir(parents=True)
    (folder / "round-1.telemetry.jsonl.gz").write_bytes(data)
    (folder / "round-1.requests.jsonl.gz").write_bytes(data)
    with pytest.raises(FileFormatError, match=r"round-1\.telemetry\.jsonl\.gz is damaged"):
        read_telemetry(tmp_path, 3, 1)
    if data:
        with pytest.raises(FileFormatError, match=r"round-1\.requests\.jsonl\.gz is damaged"):
            read_requests(tmp_path, 3, 1)


def test_folders_with_other_names_are_no_trials(tmp_path: Path) -> None:
    for name in ("0003", "²", "notes"):
        (tmp_path / "trials" / name).mkdir(parents=True)
    assert StudyDirectory(tmp_path).numbers() == [3]
