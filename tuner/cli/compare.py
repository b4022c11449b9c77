"""`chunktune compare`: two servers, or two frozen configurations, against each other."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.options import (
    MAX_SEED,
    Engine,
    EngineOption,
    JsonOption,
    KeyOption,
    ModelOption,
    OutOption,
    QuietOption,
    RoundsOption,
    SetOption,
    VllmOption,
    api_key,
)
from tuner.cli.regress import EXIT_CODES, STAGES, TOLERANCE, choose_for, kept_starts, say

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tuner.experiment.events import Events
    from tuner.experiment.store import Store
    from tuner.regress.compare import Comparison
    from tuner.regress.verdict import Rules

    Run = Callable[[Store, Events], Coroutine[None, None, Comparison]]


def compare(
    a: Annotated[str, typer.Argument(help="Base URL of a running server, or a frozen.json.")],
    b: Annotated[str, typer.Argument(help="The same for the other side.")],
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="PROFILE", help="Load for two servers. [default]")
    ] = None,
    model: ModelOption = None,
    model_b: Annotated[str | None, typer.Option("--model-b", metavar="ID", help="Model id of B.")] = None,
    api_key_env: KeyOption = None,
    api_key_env_b: Annotated[
        str | None, typer.Option("--api-key-env-b", metavar="NAME", help="The variable that holds the key of B.")
    ] = None,
    tolerance: Annotated[float | None, TOLERANCE] = None,
    rounds: RoundsOption = None,
    starts: Annotated[int, typer.Option("--starts", min=1, help="Fresh starts of each of two frozen files.")] = 3,
    stages: Annotated[int, STAGES] = 3,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare frozen files of different loads, under that of A.")
    ] = False,
    no_live: Annotated[
        bool, typer.Option("--no-live", help="Fresh starts in turn, also where one start could measure both files.")
    ] = False,
    overrides: SetOption = None,
    engine: EngineOption = Engine.auto,
    vllm: VllmOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of the prompts. [new each time]")
    ] = None,
    out: OutOption = Path("results"),
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Measure A and B in turn and say whether B is worse, better or alike."""
    from tuner.regress.compare import same_kind
    from tuner.regress.verdict import Rules

    rules = Rules(tolerance=None if tolerance is None else tolerance / 100, stages=stages)
    the_seed = secrets.randbits(32) if seed is None else seed
    if same_kind(a, b):
        keys = (api_key(api_key_env), api_key(api_key_env_b))
        run, objective = _servers((a, b), (model, model_b), keys, profile, overrides, rounds, rules, the_seed)
    else:
        on, live = (engine, vllm), not no_live
        run, objective = _files((a, b), on, rounds, starts, rules, the_seed, allow_different, live, quiet)
    result = _run(run, objective, out, quiet=quiet)
    _print(result, as_json=as_json)
    return EXIT_CODES[result.verdict]


def _servers(
    urls: tuple[str, str],
    models: tuple[str | None, str | None],
    keys: tuple[str | None, str | None],
    profile: str | None,
    overrides: list[str] | None,
    rounds: int | None,
    rules: Rules,
    seed: int,
) -> tuple[Run, str]:
    from tuner.clock import SYSTEM_CLOCK
    from tuner.load.target import Target
    from tuner.profile import load_profile
    from tuner.regress.compare import IDS
    from tuner.regress.sides import compare_servers, run_compare, servers_opener

    loaded = load_profile(profile, list(overrides or []))
    load = loaded.workload
    targets = {
        side: Target(base_url=url, model=model, api=load.api, api_key=key, request_timeout_s=load.request_timeout)
        for side, url, model, key in zip(IDS, urls, models, keys, strict=True)
    }
    names = (targets["A"].base, targets["B"].base)
    plan = compare_servers(names, loaded.regress_metrics, rules, cycles=rounds or loaded.rounds)

    async def run(store: Store, events: Events) -> Comparison:
        opener = servers_opener(targets, load, seed=seed, clock=SYSTEM_CLOCK, events=events)
        return await run_compare(plan, store, opener, SYSTEM_CLOCK, events)

    return run, loaded.objective.metrics[0]


def _files(
    paths: tuple[str, str],
    engine: tuple[Engine, str | None],
    rounds: int | None,
    starts: int,
    rules: Rules,
    seed: int,
    allow_different: bool,
    live: bool,
    quiet: bool,
) -> tuple[Run, str]:
    from tuner.clock import SYSTEM_CLOCK
    from tuner.errors import UsageError
    from tuner.freeze import load_frozen
    from tuner.regress.compare import ComparePlan
    from tuner.regress.run import rounds_at_freeze
    from tuner.regress.sides import compare_files

    a, b = (load_frozen(Path(path)) for path in paths)
    if a.workload_sha256 != b.workload_sha256 and not allow_different:
        raise UsageError(
            f"{paths[0]} and {paths[1]} were frozen under different loads",
            "Add --allow-different to run both under the load of the first.",
        )
    choices = (choose_for(a, *engine), choose_for(b, *engine))
    if choices[0].kind != choices[1].kind:
        raise UsageError(
            "one of the files would run on vLLM, the other on the simulated engine", "Choose one with --engine."
        )
    files = (a, b.model_copy(update={"workload": a.workload}))
    plan = ComparePlan(paths, a.regress_metrics, rules, starts, rounds or rounds_at_freeze(a), files)
    if not quiet:
        say(choices[0].sentence)

    def run(store: Store, events: Events) -> Coroutine[None, None, Comparison]:
        return compare_files(plan, choices, store, live=live, seed=seed, clock=SYSTEM_CLOCK, events=events)

    return run, a.objective.metrics[0]


def _run(run: Run, objective: str, out: Path, *, quiet: bool) -> Comparison:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.regress.measure import new_run
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console

    store = new_run(out, SYSTEM_CLOCK.now())
    with SweepView(progress_console(), quiet=quiet, objective=objective) as view:
        return run_interruptible(lambda: run(store, view), kept=lambda: kept_starts(store))


def _print(result: Comparison, *, as_json: bool) -> None:
    from tuner.files import dump_json
    from tuner.regress.words import describe

    if as_json:
        sys.stdout.write(dump_json(result.to_json()).decode())
        return
    words = {"regressed": "B is worse", "improved": "B is better", "ok": "no significant difference"}
    simulated = " (SIMULATED)" if result.simulated else ""
    typer.echo(
        f"{words.get(result.verdict, result.verdict)}{simulated}: B {result.names[1]} against A {result.names[0]}"
    )
    if result.differences is not None:
        differs = ", ".join(f"{name} {_set_to(a)} / {_set_to(b)}" for name, (a, b) in result.differences.items())
        typer.echo(f"  A / B: {differs or 'the same configuration'}")
    for name, m in result.metrics.items():
        typer.echo(f"  {'*' if m.gate else ' '} {name:26s} {m.verdict:13s} {describe(m)}")
    for note in result.notes:
        say(note)


def _set_to(value: object) -> str:
    return "not set" if value is None else str(value)
