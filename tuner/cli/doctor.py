"""`chunktune doctor`: what would make a sweep fail or lie."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.options import (
    Engine,
    EngineOption,
    JsonOption,
    KeyOption,
    ModelOption,
    OutOption,
    ProfileArgument,
    SetOption,
    VllmOption,
    api_key,
)

if TYPE_CHECKING:
    from tuner.doctor import Line

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "wrong": typer.colors.RED}
_FOUND_WRONG = 3


def doctor(
    profile: ProfileArgument = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Examine this server in place of the machine.")
    ] = None,
    engine: EngineOption = Engine.auto,
    vllm: VllmOption = None,
    api_key_env: KeyOption = None,
    model: ModelOption = None,
    overrides: SetOption = None,
    out: OutOption = Path("results"),
    as_json: JsonOption = False,
) -> int:
    """Say what on this machine, or at --url, would make a sweep fail or lie, and the hint.

    Exits 0 when nothing is wrong, 3 when something is.
    """
    from tuner.cli.interrupt import run_interruptible
    from tuner.doctor import Request, examine
    from tuner.profile import load_profile

    loaded = load_profile(profile, list(overrides or []))
    request = Request(
        profile=loaded,
        engine=engine.value,
        vllm=vllm,
        out=out,
        url=url,
        api_key=api_key(api_key_env),
        model=model,
    )
    lines = run_interruptible(lambda: examine(request))
    if as_json:
        from tuner.files import dump_json

        sys.stdout.write(dump_json([dataclasses.asdict(line) for line in lines]).decode())
    else:
        _show(lines)
    return _FOUND_WRONG if any(line.status == "wrong" for line in lines) else 0


def _show(lines: list[Line]) -> None:
    width = max(len(line.check) for line in lines)
    for line in lines:
        # typer.echo drops the colour where stdout is no terminal; NO_COLOR is looked at here.
        status = typer.style(f"{line.status:<7}", fg=_COLOURS[line.status])
        typer.echo(f"{status}  {line.check:<{width}}  {line.message}", color=_colour())
        if line.hint and line.status != "ok":
            typer.echo(f"{'':<7}  {'':<{width}}  -> {line.hint}", color=_colour())


def _colour() -> bool | None:
    import os

    return False if os.environ.get("NO_COLOR") else None
