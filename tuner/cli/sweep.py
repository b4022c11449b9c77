"""`chunktune sweep`: the main job."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.options import (
    Engine,
    EngineOption,
    JsonOption,
    OutOption,
    ProfileArgument,
    QuietOption,
    RoundsOption,
    SeedOption,
    SetOption,
    VllmOption,
)

if TYPE_CHECKING:
    from tuner.study.sweep import Prepared, SweepResult


def sweep(
    profile: ProfileArgument = None,
    engine: EngineOption = Engine.auto,
    vllm: VllmOption = None,
    overrides: SetOption = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Most settings to measure. [profile]")] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="DURATION", help="Time for all of it, such as 90m or 2h.")
    ] = None,
    rounds: RoundsOption = None,
    no_live: Annotated[
        bool, typer.Option("--no-live", help="Start an engine for each setting instead of switching them.")
    ] = False,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="URL", help="Optuna storage. [journal.log of the study]")
    ] = None,
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="Study name. [profile's name]")] = None,
    out: OutOption = Path("results"),
    seed: SeedOption = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new study beside an existing one.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the starts, settings, command lines and time; launch none.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Measure settings, find the best one and freeze it.

    One engine start measures every setting of PROFILE that can be switched while it runs, beside stock; the best ones
    and stock are measured again on fresh starts. Interrupted, the same command continues.
    """
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.experiment.choice import choose_engine
    from tuner.profile import load_profile
    from tuner.study.sweep import SweepRequest, prepare

    extra = list(overrides or [])
    extra += [f"budget.trials={trials}"] if trials is not None else []
    extra += [f"budget.time={budget}"] if budget is not None else []
    extra += [f"rounds={rounds}"] if rounds is not None else []
    loaded = load_profile(profile, extra)
    choice = choose_engine(engine.value, vllm, loaded.hardware, loaded.model)
    request = SweepRequest(loaded, choice, out, study or loaded.name, seed, fresh, storage, live=not no_live)
    prepared = run_interruptible(lambda: prepare(request, SYSTEM_CLOCK))
    if not quiet:
        typer.echo(prepared.first_line, err=True)
    if dry_run:
        return _dry_run(prepared, as_json=as_json)
    return _run(prepared, as_json=as_json, quiet=quiet)


def _dry_run(prepared: Prepared, *, as_json: bool) -> int:
    from tuner.clock import SYSTEM_CLOCK
    from tuner.files import dump_json
    from tuner.study.preview import preview

    found = preview(prepared, SYSTEM_CLOCK)
    if as_json:
        sys.stdout.write(dump_json(dataclasses.asdict(found)).decode())
        return 0
    for start in found.starts:
        typer.echo(f"# {start.label}: {'; '.join(start.settings)}")
        typer.echo(shlex.join(start.command))
    for sentence in found.then:
        typer.echo(f"# {sentence}")
    for label, reason in found.infeasible.items():
        typer.echo(f"# not measured: {label}: {reason}")
    typer.echo(f"# {found.expected.sentence}")
    return 0


def _run(prepared: Prepared, *, as_json: bool, quiet: bool) -> int:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.experiment.store import Store
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console
    from tuner.study.sweep import sweep as run_sweep

    objective = prepared.request.profile.objective.metrics[0]
    view = SweepView(progress_console(), quiet=quiet, objective=objective)
    view.resumed(Store(prepared.path).results())
    with view:
        result = run_interruptible(
            lambda: run_sweep(prepared, SYSTEM_CLOCK, view),
            on_signal=lambda: view.message("stopping the engine; what was measured is kept"),
            kept="What was measured is kept; the same command continues.",
        )
    _show(result, as_json=as_json)
    if result.error is not None:
        raise result.error
    return 0


def _show(result: SweepResult, *, as_json: bool) -> None:
    if as_json:
        from tuner.files import dump_json

        sys.stdout.write(dump_json(result.summary.to_json()).decode())
        return
    from tuner.report.console import closing_table
    from tuner.report.terminal import result_console

    console = result_console()
    console.print(closing_table(result.summary, result.study))
    frozen = result.store.frozen_file
    if frozen.exists():
        console.print(f"frozen configuration: {frozen}", soft_wrap=True)
    else:
        console.print(f"results: {result.store.path}", soft_wrap=True)
