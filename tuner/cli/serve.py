"""`chunktune serve`: becomes `vllm serve` on a frozen configuration."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.freeze import refuse_simulated
from tuner.cli.options import Engine, VllmOption
from tuner.cli.regress import choose_for, say


def serve(
    frozen: Annotated[Path, typer.Argument(metavar="FROZEN", help="A frozen.json.")],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGS", help="More arguments for `vllm serve`, such as --port 8000."),
    ] = None,
    vllm: VllmOption = None,
    allow_simulated: Annotated[
        bool, typer.Option("--allow-simulated", help="Serve a result of the simulated engine too, on that engine.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
) -> int:
    """Replace this process with `vllm serve` on the frozen configuration; signals reach vLLM directly."""
    import asyncio

    from tuner.engine.installed import check_options, inspect_installed
    from tuner.freeze import load_frozen
    from tuner.freeze.export import serve_command, served_model

    document = load_frozen(frozen)
    if document.simulated:
        refuse_simulated(document, str(frozen), allow_simulated)
    more = list(extra or [])
    choice = choose_for(document, Engine.auto, vllm)
    env = {**choice.env, **document.engine_env}
    installed = asyncio.run(inspect_installed(choice.launcher, env))
    check_options(installed, document.engine_args)
    for name in overridden(document.engine_args, more):
        say(f"warning: {name} overrides the frozen configuration: what was measured no longer holds")
    model = served_model(document.command, document.model)
    command = [*serve_command(choice.launcher, model, document.engine_args, document.reuse_budget), *more]
    if dry_run:
        typer.echo(shlex.join(command))
        return 0
    say(f"exec {shlex.join(command)}")
    environment = {**os.environ, **env}
    if choice.kind == "vllm" and document.reuse_budget is not None and not document.reuse_budget.off:
        environment["PYTHONPATH"] = _plugin_path(environment)
    _become(command, environment)
    return 0


def overridden(frozen_args: Mapping[str, object], extra: Sequence[str]) -> list[str]:
    """Options among `extra` that the frozen configuration sets too."""
    found = []
    for word in extra:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            if name in frozen_args or name.removeprefix("no_") in frozen_args:
                found.append(word.partition("=")[0])
    return found


def _plugin_path(environment: Mapping[str, str]) -> str:
    from tuner.engine.launch import plugin_folder

    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chunktune"
    folder = str(plugin_folder(cache))
    return os.pathsep.join(p for p in (folder, environment.get("PYTHONPATH", "")) if p)


def _become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    from tuner.errors import UsageError

    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from None
