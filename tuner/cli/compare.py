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
from tuner.cli.regress import EXIT_CODES, TOLERANCE, choose_for, kept_starts, say

if TYPE_CHECKING:
    from tuner.regress.compare import Comparison
    from tuner.regress.verdict import Rules


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
    looks: Annotated[int, typer.Option("--looks", min=1, help="Looks at most: a suspicion brings more rounds.")] = 3,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare frozen files of different loads, under that of A.")
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
    """Measure A and B in turn (A B B A) and say whether B is worse, better or alike."""
    from tuner.regress.compare import same_kind
    from tuner.regress.verdict import Rules

    rules = Rules(tolerance=None if tolerance is None else tolerance / 100, looks=looks)
    the_seed = secrets.randbits(32) if seed is None else seed
    if same_kind(a, b):
        keys = (api_key(api_key_env), api_key(api_key_env_b))
        result = _servers((a, b), (model, model_b), keys, profile, overrides, rounds, rules, the_seed, quiet)
    else:
        result = _files(
            (Path(a), Path(b)), (engine, vllm), rounds, starts, rules, the_seed, out, allow_different, quiet
        )
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
    quiet: bool,
) -> Comparison:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.load.target import Target
    from tuner.profile import load_profile
    from tuner.regress.compare import compare_servers
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console

    loaded = load_profile(profile, list(overrides or []))
    left, right = (
        Target(
            base_url=url,
            model=model,
            api=loaded.workload.api,
            api_key=key,
            request_timeout_s=loaded.workload.request_timeout,
        )
        for url, model, key in zip(urls, models, keys, strict=True)
    )
    with SweepView(progress_console(), quiet=quiet) as view:
        return run_interruptible(
            lambda: compare_servers(
                left,
                right,
                loaded.workload,
                loaded.regress_metrics,
                rounds=rounds or loaded.rounds,
                rules=rules,
                seed=seed,
                clock=SYSTEM_CLOCK,
                progress=view,
            ),
            kept="A comparison of servers keeps nothing: start the command again.",
        )


def _files(
    paths: tuple[Path, Path],
    engine: tuple[Engine, str | None],
    rounds: int | None,
    starts: int,
    rules: Rules,
    seed: int,
    out: Path,
    allow_different: bool,
    quiet: bool,
) -> Comparison:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.errors import UsageError
    from tuner.freeze import load_frozen
    from tuner.regress.compare import compare_configurations, configuration_differences
    from tuner.regress.run import rounds_at_freeze
    from tuner.regress.starts import Arm, EngineStarter, PerArm, profile_of
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console

    a, b = (load_frozen(path) for path in paths)
    if a.workload_sha256 != b.workload_sha256 and not allow_different:
        raise UsageError(
            f"{paths[0]} and {paths[1]} were frozen under different loads",
            "Add --allow-different to run both under the load of the first.",
        )
    choices = [choose_for(frozen, *engine) for frozen in (a, b)]
    if choices[0].kind != choices[1].kind:
        raise UsageError(
            "one of the files would run on vLLM, the other on the simulated engine", "Choose one with --engine."
        )
    folder = out / "nights" / f"compare-{SYSTEM_CLOCK.now():%Y%m%dT%H%M%S}"
    per_start = rounds or rounds_at_freeze(a)
    if not quiet:
        say(choices[0].sentence)

    metric_path = a.objective.metrics[0]
    with SweepView(progress_console(), quiet=quiet, metric_path=metric_path) as view:
        profiles = [profile_of(frozen.model_copy(update={"workload": a.workload}), per_start) for frozen in (a, b)]
        starters = [
            EngineStarter(choice, profile, per_start, seed, folder, SYSTEM_CLOCK, view)
            for choice, profile in zip(choices, profiles, strict=True)
        ]
        result = run_interruptible(
            lambda: compare_configurations(
                Arm("A", a.engine_args, a.reuse_budget),
                Arm("B", b.engine_args, b.reuse_budget),
                (str(paths[0]), str(paths[1])),
                a.regress_metrics,
                starts=starts,
                rules=rules,
                starter=PerArm({"A": starters[0], "B": starters[1]}),
                progress=view,
                simulated=choices[0].simulated,
                differences=configuration_differences(a, b),
            ),
            kept=lambda: kept_starts(folder),
        )
    for line in [*starters[0].said, *starters[1].said]:
        say(line)
    return result


def _print(result: Comparison, *, as_json: bool) -> None:
    from tuner.files import dump_json
    from tuner.regress.words import describe

    if as_json:
        sys.stdout.write(dump_json(result.to_json()).decode())
        return
    words = {"regressed": "B is worse", "improved": "B is better", "ok": "no difference that counts"}
    simulated = " (SIMULATED)" if result.simulated else ""
    typer.echo(
        f"{words.get(result.verdict, result.verdict)}{simulated}: B {result.names[1]} against A {result.names[0]}"
    )
    if result.differences is not None:
        differs = ", ".join(f"{name} {_set_to(a)} / {_set_to(b)}" for name, (a, b) in result.differences.items())
        typer.echo(f"  A / B: {differs or 'the same configuration'}")
    for name, m in result.metrics.items():
        typer.echo(f"  {'*' if m.gate else ' '} {name:26s} {m.verdict:13s} {describe(m)}")


def _set_to(value: object) -> str:
    return "not set" if value is None else str(value)
