"""`chunktune bench`: a server that runs already, measured like a trial."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.options import (
    MAX_SEED,
    JsonOption,
    KeyOption,
    ModelOption,
    ProfileArgument,
    QuietOption,
    RoundsOption,
    SetOption,
    UrlOption,
    api_key,
)

if TYPE_CHECKING:
    from tuner.domain.experiment import Trial
    from tuner.domain.profile import Profile


def bench(
    profile: ProfileArgument = None,
    url: UrlOption = "http://127.0.0.1:8000",
    model: ModelOption = None,
    api_key_env: KeyOption = None,
    overrides: SetOption = None,
    rounds: RoundsOption = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, max=MAX_SEED, help="Seed of the prompts. [new each time, so that nothing is cached]"
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> int:
    """Measure the server at --url under the load of PROFILE; launches and changes nothing.

    Interrupted, it prints the rounds that had finished.
    """
    from tuner.errors import Interrupted
    from tuner.profile import load_profile

    loaded = load_profile(profile, [*(overrides or []), *([f"rounds={rounds}"] if rounds is not None else [])])
    interrupted: list[Trial] = []
    try:
        trial = _measure(
            loaded,
            url,
            model,
            api_key(api_key_env),
            secrets.randbits(32) if seed is None else seed,
            interrupted,
            quiet=quiet,
        )
    except Interrupted:
        for unfinished in interrupted:
            _print(unfinished, as_json=as_json)
        raise
    _print(trial, as_json=as_json)
    return 0 if trial.state == "completed" else 3


def _print(trial: Trial, *, as_json: bool) -> None:
    if as_json:
        from tuner.files import dump_json

        sys.stdout.write(dump_json(trial.to_json()).decode())
    else:
        from tuner.report.bench import bench_table
        from tuner.report.terminal import result_console

        result_console().print(bench_table(trial))
    sys.stdout.flush()


def _measure(
    profile: Profile,
    url: str,
    model: str | None,
    key: str | None,
    seed: int,
    interrupted: list[Trial],
    *,
    quiet: bool,
) -> Trial:
    """The measured server. Interrupted, with the trial so far in `interrupted` when a round of it counts."""
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.domain.units import counted
    from tuner.load.target import Target
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console
    from tuner.trial.bench import bench_server

    target = Target(
        base_url=url,
        model=model,
        api=profile.workload.api,
        api_key=key,
        request_timeout_s=profile.workload.request_timeout,
    )

    def kept() -> str:
        done = sum(r.void is None for trial in interrupted for r in trial.rounds)
        of = counted(profile.rounds, "round")
        return f"What is printed rests on {done} of {of}." if done else f"None of {of} had finished."

    with SweepView(progress_console(), quiet=quiet) as view:
        return run_interruptible(
            lambda: bench_server(
                target, profile, seed=seed, clock=SYSTEM_CLOCK, progress=view, on_interrupted=interrupted.append
            ),
            kept=kept,
        )
