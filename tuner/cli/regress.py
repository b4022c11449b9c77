"""`chunktune regress`: does a frozen configuration still deliver?"""

from __future__ import annotations

import enum
import secrets
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuner.cli.options import MAX_SEED, Engine, EngineOption, JsonOption, OutOption, QuietOption, VllmOption

if TYPE_CHECKING:
    from tuner.domain.frozen import Frozen
    from tuner.experiment.choice import EngineChoice
    from tuner.experiment.store import Store
    from tuner.regress.regress import RegressRequest
    from tuner.regress.run import RunResult

EXIT_CODES = {"ok": 0, "improved": 0, "regressed": 10, "inconclusive": 4, "not comparable": 2}


class Control(enum.StrEnum):
    """When the stock setting is measured beside the frozen one."""

    auto = "auto"
    always = "always"
    never = "never"


TOLERANCE = typer.Option(
    "--tolerance", metavar="PCT", min=0.0, help="Change in percent that is accepted. [the spread of one start]"
)
STAGES = typer.Option("--stages", min=1, help="Stages at most: a suspicion adds one, with more starts or rounds.")


def regress(
    frozen: Annotated[Path, typer.Argument(help="A frozen.json.")],
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Append a summary for a job's page.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option("--history", metavar="FILE", help="JSON lines of all runs; only grows.")
    ] = None,
    tolerance: Annotated[float | None, TOLERANCE] = None,
    starts: Annotated[
        int | None, typer.Option("--starts", min=1, help="Fresh starts. [by the number of starts at the freeze]")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds per start. [as at the freeze]")] = None,
    stages: Annotated[int, STAGES] = 3,
    control: Annotated[
        Control,
        typer.Option("--control", help="Measure the stock setting too: auto does on a suspicion and for --rebase."),
    ] = Control.auto,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Judge even on another GPU or engine.")
    ] = False,
    rebase: Annotated[
        Path | None,
        typer.Option(
            "--rebase",
            metavar="FILE",
            help="Freeze what is measured now; keeps the old numbers. 12 starts, and 12 of the stock setting.",
        ),
    ] = None,
    engine: EngineOption = Engine.auto,
    vllm: VllmOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of the prompts. [new each time]")
    ] = None,
    out: OutOption = Path("results"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Run a frozen configuration on fresh starts and judge it against what was measured at the freeze."""
    from tuner.clock import SYSTEM_CLOCK
    from tuner.domain.units import counted
    from tuner.freeze import load_frozen
    from tuner.regress.history import append_history, frozen_id, read_history
    from tuner.regress.measure import new_run
    from tuner.regress.plan import REBASE_STARTS, default_starts
    from tuner.regress.regress import RegressRequest
    from tuner.regress.run import RunPlan, rounds_at_freeze
    from tuner.regress.verdict import Rules

    document = load_frozen(frozen)
    check_outputs(frozen, junit, markdown, history, rebase)
    earlier, damaged = read_history(history, frozen_id(document)) if history else ([], 0)
    if damaged:
        say(f"warning: left out of {history} because unreadable: {counted(damaged, 'line')}")
    choice = choose_for(document, engine, vllm)
    if not quiet:
        say(choice.sentence)
    plan = RunPlan(
        frozen=document,
        fingerprint=document.fingerprint,
        planned=starts or (REBASE_STARTS if rebase is not None else default_starts(document.measured.starts)),
        rounds=rounds or rounds_at_freeze(document),
        rules=Rules(
            tolerance=None if tolerance is None else tolerance / 100, stages=1 if rebase is not None else stages
        ),
        stock_mode=control.value,
        history=earlier,
        rebase=rebase is not None,
    )
    store = new_run(out, SYSTEM_CLOCK.now())
    the_seed = secrets.randbits(32) if seed is None else seed
    result = _run(
        RegressRequest(plan, choice, store, the_seed, allow_different), str(frozen), junit, markdown, quiet=quiet
    )
    if history is not None and result.verdict != "not comparable":
        append_history(history, result.history_row(SYSTEM_CLOCK.now().isoformat(timespec="seconds")))
    _print(result, as_json=as_json)
    if rebase is not None and result.verdict != "not comparable":
        _rebase(result, rebase)
        return 0
    return EXIT_CODES[result.verdict]


def check_outputs(
    frozen: Path, junit: Path | None, markdown: Path | None, history: Path | None, rebase: Path | None
) -> None:
    """UsageError, or FileFormatError, before the work where a file could not be written after it."""
    from tuner.errors import UsageError
    from tuner.files import refuse_foreign
    from tuner.freeze import load_frozen

    for path in (junit, markdown, history, rebase):
        check_writable(path)
        if path is not None and path != rebase and path.exists() and path.samefile(frozen):
            raise UsageError(f"{path} is the frozen file itself", "Name another file.")
    if junit is not None:
        refuse_foreign(junit, b"<testsuite")
    if rebase is not None and rebase.exists():
        load_frozen(rebase)


def choose_for(frozen: Frozen, engine: Engine, vllm: str | None) -> EngineChoice:
    """The engine that the file was frozen on, unless another one is asked for."""
    from tuner.experiment.choice import choose_engine

    option: Literal["auto", "vllm", "sim"] = engine.value
    if engine is Engine.auto and vllm is None:
        option = frozen.fingerprint.engine
        # The command that was measured, where it is still there; else `vllm` on the PATH.
        if option == "vllm" and "serve" in frozen.command[1:] and shutil.which(frozen.command[0]):
            vllm = shlex.join(frozen.command[: frozen.command.index("serve")])
    return choose_engine(option, vllm, frozen.hardware, frozen.model)


def check_writable(path: Path | None) -> None:
    """UsageError before the work when a file could not be written after it."""
    from tuner.errors import UsageError

    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "Name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "Name another file.") from None


def kept_starts(store: Store) -> str:
    """What is left of an interrupted run, and how to go on."""
    from tuner.domain.units import counted

    finished = len(store.results().numbers())
    again = "A verdict takes a whole run: start the command again."
    return f"{counted(finished, 'finished start')} kept in {store.path}. {again}" if finished else again


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"chunktune: {text}\n")
    sys.stderr.flush()


def _run(request: RegressRequest, name: str, junit: Path | None, markdown: Path | None, *, quiet: bool) -> RunResult:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.errors import EngineError, LoadError
    from tuner.files import write_whole
    from tuner.regress.junit import Case, junit_xml, verdict_cases
    from tuner.regress.markdown import run_markdown
    from tuner.regress.regress import run_regress
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console

    began_s, at = SYSTEM_CLOCK.monotonic_s(), SYSTEM_CLOCK.now().isoformat(timespec="seconds")

    def write(cases: list[Case], summary: str) -> None:
        if junit is not None:
            time_s = SYSTEM_CLOCK.monotonic_s() - began_s
            write_whole(junit, junit_xml(name, cases, time_s=time_s, timestamp=at).encode())
        if markdown is not None:
            with markdown.open("ab") as file:
                file.write(summary.encode())

    try:
        objective = request.plan.frozen.objective.metrics[0]
        with SweepView(progress_console(), quiet=quiet, objective=objective) as view:
            result = run_interruptible(
                lambda: run_regress(request, SYSTEM_CLOCK, view), kept=lambda: kept_starts(request.store)
            )
    except (EngineError, LoadError) as error:
        text = f"{error}\nlogs: {request.store.path}"
        write(
            [Case("engine", "error", error.message, text)],
            f"## chunktune: {name}: 🛠 no verdict, the engine or the hardware failed\n\n```\n{text}\n```\n",
        )
        raise
    cases = verdict_cases(result.metrics, result.limits, result.suspects)
    if result.verdict == "not comparable":
        cases = [Case("comparable", "error", "; ".join(result.notes))]
    write(cases, run_markdown(result, name))
    return result


def _rebase(result: RunResult, path: Path) -> None:
    from tuner.clock import SYSTEM_CLOCK
    from tuner.domain.units import counted
    from tuner.freeze import save_frozen
    from tuner.regress.rebase import rebased

    verb = "replaced" if path.exists() else "wrote"
    fresh = rebased(result, SYSTEM_CLOCK.now().isoformat(timespec="seconds"))
    save_frozen(path, fresh)
    starts = f"the {counted(result.starts, 'start')} of this run"
    if result.stock_rounds:
        starts += f", with {len(result.stock_rounds)} of the stock setting"
    say(f"{verb} {path}: later runs are judged against {starts}; the old numbers are kept in it")
    if fresh.stock is None and result.frozen.stock is not None:
        say("the stock setting was not measured: later runs cannot tell by it whether the machine has changed")


def _print(result: RunResult, *, as_json: bool) -> None:
    from tuner.domain.units import counted
    from tuner.files import dump_json
    from tuner.regress.words import describe, describe_limit

    if as_json:
        sys.stdout.write(dump_json(result.to_json()).decode())
    else:
        simulated = " (SIMULATED)" if result.frozen.simulated else ""
        of = f"{counted(result.starts, 'fresh start')} against {result.frozen.measured.starts} at the freeze"
        typer.echo(f"{result.verdict}{simulated}: {of}")
        for name, m in result.metrics.items():
            typer.echo(f"  {'*' if m.gate else ' '} {name:26s} {m.verdict:13s} {describe(m)}")
        for limit in result.limits:
            typer.echo(f"    {limit.constraint:26s} {limit.verdict:13s} {describe_limit(limit)}")
        for suspect in result.suspects:
            typer.echo(f"  suspect: {suspect}")
    for note in result.notes:
        say(note)
    if result.verdict == "not comparable":
        say("error: this run cannot be compared with the frozen file\n  Add --allow-different to judge all the same.")
