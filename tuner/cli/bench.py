"""`chunktune bench`: a server that runs already."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
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
    from tuner.domain.profile import Profile
    from tuner.experiment.store import Store
    from tuner.load.target import Target
    from tuner.report.bench import BenchResult


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
    from tuner.experiment.store import Store
    from tuner.load.target import Target
    from tuner.profile import load_profile
    from tuner.regress.bench import bench_result

    loaded = load_profile(profile, [*(overrides or []), *([f"rounds={rounds}"] if rounds is not None else [])])
    target = Target(
        base_url=url,
        model=model,
        api=loaded.workload.api,
        api_key=api_key(api_key_env),
        request_timeout_s=loaded.workload.request_timeout,
    )
    with TemporaryDirectory(prefix="chunktune-bench-") as folder:
        store = Store(Path(folder))
        try:
            result = _measure(target, loaded, store, secrets.randbits(32) if seed is None else seed, quiet=quiet)
        except Interrupted:
            if store.results().kept():
                _print(bench_result(store, loaded), as_json=as_json)
            raise
    _print(result, as_json=as_json)
    return 0 if result.start.state == "completed" else 3


def _print(result: BenchResult, *, as_json: bool) -> None:
    if as_json:
        from tuner.files import dump_json

        sys.stdout.write(dump_json(result.to_json()).decode())
    else:
        from tuner.report.terminal import result_console

        result_console().print(result)
    sys.stdout.flush()


def _measure(target: Target, profile: Profile, store: Store, seed: int, *, quiet: bool) -> BenchResult:
    from tuner.cli.interrupt import run_interruptible
    from tuner.clock import SYSTEM_CLOCK
    from tuner.domain.units import counted
    from tuner.regress.bench import bench
    from tuner.report.live import SweepView
    from tuner.report.terminal import progress_console

    def kept() -> str:
        done, of = len(store.results().kept()), counted(profile.rounds, "round")
        return f"What is printed rests on {done} of {of}." if done else f"None of {of} had finished."

    with SweepView(progress_console(), quiet=quiet, objective=profile.objective.metrics[0]) as view:
        return run_interruptible(
            lambda: bench(target, profile, store, seed=seed, clock=SYSTEM_CLOCK, events=view), kept=kept
        )
