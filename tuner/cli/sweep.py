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
    from tuner.domain.profile import Profile
    from tuner.study.sweep import SweepRequest, SweepResult


def sweep(
    profile: ProfileArgument = None,
    engine: EngineOption = Engine.auto,
    vllm: VllmOption = None,
    overrides: SetOption = None,
    trials: Annotated[int | None, typer.Option("--trials", min=1, help="Candidates to measure at most.")] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="DURATION", help="Time for the search, such as 90m or 2h.")
    ] = None,
    rounds: RoundsOption = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="URL", help="Optuna storage. [journal.log of the study]")
    ] = None,
    study: Annotated[str | None, typer.Option("--study", metavar="NAME", help="Study name. [profile's name]")] = None,
    out: OutOption = Path("results"),
    seed: SeedOption = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new study beside an existing one.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the profile, print each command line, launch none.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Measure candidates, find the best configuration and freeze it.

    Measures the untouched configuration first, then the candidates of PROFILE, then the best two and
    the baseline once more on fresh starts. Interrupted, the same command continues.
    """
    from tuner.profile import load_profile
    from tuner.study.sweep import SweepRequest
    from tuner.experiment.choice import choose_engine

    extra = list(overrides or [])
    extra += [f"budget.trials={trials}"] if trials is not None else []
    extra += [f"budget.time={budget}"] if budget is not None else []
    extra += [f"rounds={rounds}"] if rounds is not None else []
    loaded = load_profile(profile, extra)
    choice = choose_engine(engine.value, vllm, loaded.hardware, loaded.model)
    if not quiet:
        typer.echo(choice.sentence, err=True)
    request = SweepRequest(loaded, choice, out, study or loaded.name, seed, fresh, storage)
    if dry_run:
        return _dry_run(request, as_json=as_json)
    return _run(request, loaded, as_json=as_json, quiet=quiet)


def _dry_run(request: SweepRequest, *, as_json: bool) -> int:
    from tuner.cli.interrupt import run_interruptible
    from tuner.files import dump_json
    from tuner.study.preview import preview

    lines = run_interruptible(lambda: preview(request))
    if as_json:
        sys.stdout.write(dump_json([dataclasses.asdict(line) for line in lines]).decode())
        return 0
    for line in lines:
        typer.echo(f"# {line.label}")
        typer.echo(shlex.join(line.command))
    return 0


def _run(request: SweepRequest, profile: Profile, *, as_json: bool, quiet: bool) -> int:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console
    from tuner.study.sweep import sweep as run_sweep

    console = progress_console()
    view = SweepView(console, quiet=quiet, metric_path=profile.objective.metrics[0])
    with view:
        result = run_interruptible(
            lambda: run_sweep(request, SYSTEM_CLOCK, view),
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
    from tuner.report.answer import answer
    from tuner.report.console import closing_table
    from tuner.report.terminal import result_console

    console = result_console()
    console.print(closing_table(result.summary, result.study, result.trials))
    frozen = result.directory.frozen_file
    if result.summary.best is not None and frozen.exists():
        said = answer(result.study, result.summary, result.trials)
        of = " (the best of the others)" if said.kind == "stock_will_do" else ""
        console.print(f"frozen configuration{of}: {frozen}", soft_wrap=True)
    else:
        console.print(f"results: {result.directory.path}", soft_wrap=True)
