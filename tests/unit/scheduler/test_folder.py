"""The folder that carries commands and reports: what is in it is whole, new, and the tuner's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.scheduler.test_messages import REPORT
from tuner.scheduler.folder import FolderChannel, channel_of, make_folder, read_report, write_command
from tuner.scheduler.handles import LiveHandleError
from tuner.scheduler.messages import FOLDER_VARIABLE, Command, MessageError

COMMAND = Command("n", "apply", {"max_num_batched_tokens": 64}, 5.0)
ASK = Command("m", "report")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "live")


def test_a_command_is_taken_once_by_each_engine(folder: Path) -> None:
    one, two = FolderChannel(folder, 0), FolderChannel(folder, 1)
    assert one.take() is None
    write_command(folder, COMMAND)
    assert one.take() == COMMAND
    assert one.take() is None
    write_command(folder, ASK)
    assert one.take() == ASK
    assert two.take() == ASK


def test_a_report_is_read_by_its_engine_and_gone_with_the_next_command(folder: Path) -> None:
    FolderChannel(folder, 1).put(REPORT)
    assert read_report(folder, 0) is None
    assert read_report(folder, 1) == REPORT
    write_command(folder, ASK)
    assert read_report(folder, 1) is None


def test_nobody_else_can_read_or_write(folder: Path) -> None:
    write_command(folder, COMMAND)
    FolderChannel(folder, 0).put(REPORT)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "command.json": 0o600,
        "report-0.json": 0o600,
    }


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    folder.chmod(0o710)
    with pytest.raises(MessageError, match="has mode 0710, which lets others in"):
        FolderChannel(folder, 0)


def test_a_folder_that_was_opened_later_is_refused_with_its_next_command(folder: Path) -> None:
    channel = FolderChannel(folder, 0)
    folder.chmod(0o777)
    assert channel.take() is None
    write_command(folder, COMMAND)
    with pytest.raises(MessageError, match="has mode 0777"):
        channel.take()


def test_a_link_is_no_folder_and_no_command(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(MessageError, match="is not a folder"):
        FolderChannel(link, 0)
    write_command(folder, COMMAND)
    (folder / "command.json").rename(tmp_path / "elsewhere.json")
    (folder / "command.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(MessageError, match="cannot be read"):
        FolderChannel(folder, 0).take()


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644])
def test_a_file_that_others_can_touch_is_refused_once(folder: Path, mode: int) -> None:
    channel = FolderChannel(folder, 0)
    write_command(folder, COMMAND)
    (folder / "command.json").chmod(mode)
    with pytest.raises(MessageError, match=f"has mode 0{mode:o}"):
        channel.take()
    assert channel.take() is None
    write_command(folder, ASK)
    assert channel.take() == ASK


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_refused(folder: Path) -> None:
    channel = FolderChannel(folder, 0)
    write_command(folder, COMMAND)
    os.chown(folder / "command.json", 65534, 65534)
    with pytest.raises(MessageError, match="belongs to user 65534, this process runs as 0"):
        channel.take()
    os.chown(folder, 65534, 65534)
    with pytest.raises(MessageError, match="belongs to user 65534"):
        FolderChannel(folder, 0)


def test_a_file_without_an_end_is_not_read_to_it(folder: Path) -> None:
    write_command(folder, COMMAND)
    with (folder / "command.json").open("ab") as file:
        file.write(b" " * (1 << 17))
    with pytest.raises(MessageError, match="larger than"):
        FolderChannel(folder, 0).take()


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "command.json", 0o600)
    with pytest.raises(MessageError, match="not a plain file"):
        FolderChannel(folder, 0).take()


def test_a_folder_that_is_gone_stops_no_engine(folder: Path) -> None:
    channel = FolderChannel(folder, 0)
    folder.rmdir()
    assert channel.take() is None
    channel.put(REPORT)
    assert not folder.exists()


def test_an_engine_without_its_folder_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    assert channel_of({FOLDER_VARIABLE: str(folder)}, 0).take() is None
    for environment in ({}, {FOLDER_VARIABLE: ""}, {FOLDER_VARIABLE: str(tmp_path / "none")}):
        with pytest.raises(LiveHandleError, match="live control cannot run here") as refused:
            channel_of(environment, 0)
        assert "\n" not in str(refused.value)
