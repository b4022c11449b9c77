"""Where a finished study is, and where a command may write what it makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

StudyArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="STUDY_DIR",
        help="A study: its folder, or its name below --out. Default: the newest there.",
        show_default=False,
    ),
]
StudiesOption = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="The folder of all studies, as for sweep; -o is the file to write."),
]


def find_study(named: Path | None, out: Path) -> Path:
    """The folder of a study that was named by folder or, below `out`, by name; the newest where none was.

    UsageError when none is below `out`; a folder that is named and no study is returned as it is.
    """
    from tuner.experiment.store import newest_study

    if named is None:
        return newest_study(out)
    by_name = out / named
    return by_name if not _is_study(named) and _is_study(by_name) else named


def check_output(path: Path, example: str) -> None:
    """UsageError where no file can be made: a folder stands there, or its own folder does not exist.

    Written anyway, a misspelt path would leave a new folder and no word about it.
    """
    from tuner.errors import UsageError

    if path.is_dir():
        raise UsageError(f"{path} is a folder", f"Name a file, such as {path / example}.")
    folder = Path(os.path.realpath(path)).parent
    if not path.exists() and not folder.is_dir():
        raise UsageError(f"the folder {folder} does not exist", f"Make it first (mkdir -p {folder}), or name another.")


def _is_study(folder: Path) -> bool:
    return (folder / "study.json").is_file()
