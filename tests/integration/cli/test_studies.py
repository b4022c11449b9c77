"""Where `freeze` and `report` look for a study, and where they may write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.command import chunktune
from tests.unit.study.test_sweep import engines, prepared, swept
from tuner.cli.studies import check_output, find_study
from tuner.errors import UsageError

WRITING = [["freeze", "--allow-simulated"], ["report"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that is through."""
    out = tmp_path_factory.mktemp("finished")
    asyncio.run(swept(prepared(out, "space.refine=false"), engines()))
    return out / "s"


def study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "study.json").write_text("{}")
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
def test_out_is_where_studies_are_and_o_what_is_written(finished: Path, tmp_path: Path, command: list[str]) -> None:
    for named in ([], ["s"]):
        done = chunktune(*command, *named, "--out", finished.parent, "-o", tmp_path / "made")
        assert done.code == 0, done.err
        assert (tmp_path / "made").stat().st_size > 0


@pytest.mark.parametrize("command", WRITING, ids=lambda c: c[0])
def test_no_folder_is_made_for_a_file(finished: Path, tmp_path: Path, command: list[str]) -> None:
    done = chunktune(*command, finished, "-o", tmp_path / "no" / "such" / "file")
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
