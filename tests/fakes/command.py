"""The command in this process, for whatever ends before an engine is started."""

from __future__ import annotations

from dataclasses import dataclass

from typer.testing import CliRunner

from tuner.cli.app import app


@dataclass(frozen=True)
class Done:
    """What a process would have shown."""

    code: int
    out: str
    err: str


def chunktune(*words: object) -> Done:
    """Run `chunktune WORDS` in the current folder. An exception that the command line does not catch is raised."""
    result = CliRunner().invoke(app, list(map(str, words)), prog_name="chunktune", catch_exceptions=False)
    return Done(result.exit_code, result.stdout, result.stderr)
