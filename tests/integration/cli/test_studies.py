"""Where `freeze` and `report` look for a study, and where they may write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fakes.command import chunktune
from tuner.cli.studies import check_output, find_study
from tuner.errors import UsageError

REFERENCE = Path(__file__).parents[3] / "results" / "reference"
WRITING = [["freeze", "--allow-simulated"], ["report"]]


def study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(REFERENCE / "study.json", folder)
    return folder


def test_a_study_is_found_by_folder_by_name_and_as_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = study(Path("elsewhere/one"))
    assert find_study(None, Path("elsewhere")) == one
    assert find_study(Path("one"), Path("elsewhere")) == one
    assert find_study(one, Path("results")) == one
    assert find_study(one.absolute(), Path("results")) == one.absolute()
    here = study(Path("one"))
    assert find_study(Path("one"), Path("elsewhere")) == here
    assert find_study(Path("two"), Path("elsewhere")) == Path("two")
    with pytest.raises(UsageError, match="no study below results/"):
        find_study(None, Path("results"))


@pytest.mark.parametrize("command", WRITING, ids=lambda c: c[0])
def test_out_is_where_studies_are_and_o_what_is_written(tmp_path: Path, command: list[str]) -> None:
    shutil.copytree(REFERENCE, tmp_path / "studies" / "reference")
    for named in ([], ["reference"]):
        done = chunktune(*command, *named, "--out", tmp_path / "studies", "-o", tmp_path / "made")
        assert done.code == 0, done.err
        assert (tmp_path / "made").stat().st_size > 0


@pytest.mark.parametrize("command", WRITING, ids=lambda c: c[0])
def test_no_folder_is_made_for_a_file(tmp_path: Path, command: list[str]) -> None:
    done = chunktune(*command, REFERENCE, "-o", tmp_path / "no" / "such" / "file")
    assert done.code == 2
    assert f"the folder {tmp_path / 'no' / 'such'} does not exist" in done.err
    assert "mkdir -p" in done.err
    assert not (tmp_path / "no").exists()


def test_a_link_into_a_folder_that_is_gone_makes_none(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(UsageError, match="gone does not exist"):
        check_output(link, "x")
    check_output(Path("/dev/null"), "x")
    check_output(Path("relative.json"), "x")


@pytest.mark.parametrize("command", ["freeze", "report"])
def test_help_tells_both_apart(command: str) -> None:
    told = " ".join(chunktune(command, "--help").out.split())
    assert "[STUDY_DIR]" in told
    assert "--out DIR The folder of all studies" in told
    assert "--output FILE The file to write" in told
