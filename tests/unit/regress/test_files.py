"""What a night is told to write never costs a file that it did not make."""

from pathlib import Path

import pytest

from tests.fakes.frozen_trials import frozen_of, trial_of
from tuner.cli.regress import regress
from tuner.errors import UsageError
from tuner.freeze import save_frozen


@pytest.mark.parametrize("option", ["junit", "markdown", "history"])
def test_the_frozen_file_is_not_written_over(tmp_path: Path, option: str) -> None:
    path = tmp_path / "f.json"
    save_frozen(path, frozen_of(trial_of(4, [100.0])))
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is the frozen file itself"):
        regress(path, **{option: path})  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_junit_replaces_junit_only(tmp_path: Path) -> None:
    path, notes = tmp_path / "f.json", tmp_path / "notes.txt"
    save_frozen(path, frozen_of(trial_of(4, [100.0])))
    notes.write_text("kept")
    with pytest.raises(UsageError, match="was not written by chunktune"):
        regress(path, junit=notes)
    assert notes.read_text() == "kept"
