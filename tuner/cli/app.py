"""The `chunktune` command and its commands, one file each.

The command files import only typer at their top: `chunktune --help` must not wait for numpy, optuna
or aiohttp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import tuner
from tuner.cli.bench import bench
from tuner.cli.boundary import open_standard_streams, run_to_exit, with_exit_code
from tuner.cli.compare import compare
from tuner.cli.doctor import doctor
from tuner.cli.freeze import freeze
from tuner.cli.regress import regress
from tuner.cli.report import report
from tuner.cli.serve import serve
from tuner.cli.sweep import sweep

app = typer.Typer(
    name="chunktune",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"chunktune {tuner.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Finds the chunked-prefill and prefix-reuse settings of `vllm serve` with the lowest, steadiest TTFT."""


_COMMANDS: dict[Callable[..., int], str] = {
    sweep: "Measure settings, find the best one and freeze it.",
    freeze: "Write a study's winner as JSON, YAML or a command line.",
    regress: "Measure a frozen configuration again and judge it.",
    bench: "Measure a running server under the load of a profile.",
    compare: "Say whether one of two servers or configurations is worse.",
    report: "Write a study as one self-contained HTML file.",
    doctor: "Say what would break or bias a sweep, and how to fix it.",
    serve: "Become `vllm serve` on a frozen configuration.",
}
"""In the order of the help, each with a line that fits into 80 columns there."""

for command, line in _COMMANDS.items():
    app.command(short_help=line)(with_exit_code(command))


def main() -> None:
    """Entry point of the console script; exits with a code of the contract."""
    open_standard_streams()
    run_to_exit(lambda: app(prog_name="chunktune"))
