"""A trial becomes a frozen document; a frozen document is read from its file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import tuner
from tuner.clock import SYSTEM_CLOCK
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar
from tuner.domain.frozen import FROZEN_SCHEMA, Baseline, Control, Frozen, StudyRef
from tuner.domain.measurement import metric
from tuner.domain.experiment import StudyFile, Trial
from tuner.domain.profile import Profile, is_secret_name
from tuner.domain.workload import workload_sha256
from tuner.errors import FileFormatError, UsageError
from tuner.files import read_json, write_json
from tuner.freeze.baseline import baseline_of
from tuner.freeze.export import launcher_of, serve_command, served_model

NEVER_FROZEN = frozenset(
    {"host", "port", "uds", "served_model_name", "model", "model_tag", "config", "api_key", "hf_token", "root_path"}
)
"""Options that belong to one start or to one person, not to the configuration."""

_PINNED = (CHUNK_KNOB, "max_num_seqs", "max_model_len", "enable_chunked_prefill", "enable_prefix_caching")
"""Frozen as the engine ran them even when nobody asked for them: their defaults move between vLLM versions."""

_WHERE_FROM = "`chunktune sweep` writes one to results/STUDY/frozen.json, `chunktune freeze -o FILE` to another place."

_OURS = frozenset({"CHUNKTUNE_SIM", "VLLM_SERVER_DEV_MODE"})


def freeze_trial(
    trial: Trial,
    repeats: Sequence[Trial],
    study: StudyFile,
    profile: Profile,
    *,
    control: Sequence[Trial] = (),
    counts: Mapping[str, int] | None = None,
    now: datetime | None = None,
) -> Frozen:
    """The frozen form of `trial`; UsageError when it is failed, infeasible or holds no finite result.

    `repeats` are trials of the same configuration (`trial` may be among them), `control` those of the
    stock configuration. The baseline is taken from repeats that were not themselves selected by their
    numbers (finals), because a search's best number is its luckiest one; without any, from `trial`.
    """
    _refuse_unfit(trial, profile)
    starts = _unselected(trial, repeats)
    args = frozen_args(trial)
    budget = _budget(trial)
    stock = [t for t in control if _usable(t)]
    return Frozen(
        created_at=(now or SYSTEM_CLOCK.now()).isoformat(timespec="seconds"),
        chunktune_version=tuner.__version__,
        simulated=study.simulated or trial.simulated,
        model=profile.model,
        engine_args=args,
        reuse_budget=budget,
        command=serve_command(launcher_of(trial.command), served_model(trial.command, profile.model), args, budget),
        engine_env=frozen_env(profile.engine.env),
        startup_timeout_s=profile.engine.startup_timeout,
        hardware=profile.hardware,
        fingerprint=study.fingerprint,
        workload=profile.workload,
        workload_sha256=workload_sha256(profile.workload),
        baseline=baseline_of(starts),
        control=_control(stock, args, budget),
        objective=profile.objective,
        constraints=profile.constraints,
        regress_metrics=profile.regress_metrics,
        study=StudyRef(
            name=study.study, counts=dict(counts or {}), sampler=study.sampler, seed=study.seed, trial=trial.number
        ),
    )


def repeats_of(trial: Trial, trials: Iterable[Trial]) -> list[Trial]:
    """Every trial of the same configuration, `trial` among them."""
    return [t for t in trials if _configuration(t) == _configuration(trial)]


def control_of(trials: Sequence[Trial]) -> list[Trial]:
    """Every trial of the stock configuration: the baseline and its finals."""
    stock = next((t for t in trials if t.role == "baseline"), None)
    return [] if stock is None else repeats_of(stock, trials)


def load_frozen(path: Path) -> Frozen:
    """The document at `path`; FileFormatError names the file and, where one is wrong, the field."""
    value = _read(path)
    try:
        frozen = Frozen.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # Of a value that may be a number or a text, each kind says why not; our own word is the one that helps.
        first = next((each for each in errors if each["type"] == "value_error"), errors[0])
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(
            f"{path}: {where}: {first['msg']}", "It was edited or damaged; freeze the study again."
        ) from None
    alien = next((n for n in frozen.engine_args if n in NEVER_FROZEN), None)
    if alien is not None:
        raise FileFormatError(
            f"{path}: engine_args.{alien} belongs to one start or to one person, not to a configuration",
            "Take it out; `chunktune serve FILE -- --option value` gives it to one start.",
        )
    if frozen.workload_sha256 != workload_sha256(frozen.workload):
        raise FileFormatError(
            f"{path}: workload: it is not the load that the baseline was measured with (workload_sha256 differs)",
            "Undo the edit, or sweep with the new load and freeze that.",
        )
    return frozen


def _read(path: Path) -> dict[str, Any]:
    inside = path / "frozen.json"
    if os.path.isdir(path):
        hint = f"Name the one in it: {inside}" if os.path.isfile(inside) else _WHERE_FROM
        raise FileFormatError(f"{path} is a folder, a frozen file was expected", hint)
    try:
        return read_json(path, schema=FROZEN_SCHEMA)
    except FileFormatError as error:
        raise FileFormatError(error.message, error.hint or _WHERE_FROM) from None


def save_frozen(path: Path, frozen: Frozen) -> None:
    """Write the document whole."""
    write_json(path, frozen.to_json())


def frozen_args(trial: Trial) -> dict[str, Scalar]:
    """The options as the engine ran them: what was asked for, with the values read back laid over it."""
    effective = trial.effective_args or {}
    named = {name: effective.get(name, value) for name, value in trial.engine_args.items()}
    named |= {name: effective[name] for name in _PINNED if effective.get(name) is not None}
    return {n: v for n, v in named.items() if v is not None and n not in NEVER_FROZEN and not n.startswith("ssl_")}


def frozen_env(env: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment without anything that looks like a secret, and without our own switches."""
    return {name: value for name, value in env.items() if not is_secret_name(name) and name not in _OURS}


def _budget(trial: Trial) -> ReuseBudget | None:
    return None if trial.reuse_budget is None or trial.reuse_budget.off else trial.reuse_budget


def _refuse_unfit(trial: Trial, profile: Profile) -> None:
    name = f"trial {trial.number}"
    if trial.violations:
        raise UsageError(
            f"{name} breaks a constraint of the profile: {'; '.join(trial.violations)}",
            "Freeze another trial, or sweep again with constraints that can be met.",
        )
    if trial.state != "completed":
        cause = f" ({trial.cause}: {trial.message})" if trial.cause else ""
        raise UsageError(f"{name} is {trial.state}{cause}: there is nothing to freeze", "Freeze a completed trial.")
    if trial.median is None or not _valid_rounds(trial):
        raise UsageError(f"{name} holds no valid round: there is nothing to freeze", "Freeze another trial.")
    for path in profile.objective.metrics:
        value = metric(trial.median, path)
        if value is None or not math.isfinite(value):
            raise UsageError(f"{name} has no finite {path}: there is nothing to freeze", "Freeze another trial.")


def _configuration(trial: Trial) -> tuple[dict[str, Scalar], ReuseBudget | None]:
    return trial.engine_args, _budget(trial)


def _usable(trial: Trial) -> bool:
    return trial.state in ("completed", "infeasible") and _valid_rounds(trial)


def _valid_rounds(trial: Trial) -> bool:
    return any(r.void is None for r in trial.rounds)


def _unselected(trial: Trial, repeats: Iterable[Trial]) -> list[Trial]:
    # A trial merged out of several starts bears the number of its first: the starts themselves count.
    by_number = {t.number: t for t in [trial, *repeats] if _usable(t)}
    fair = [t for t in by_number.values() if t.role != "candidate"]
    return sorted(fair or [trial], key=lambda t: t.number)


def _control(stock: Sequence[Trial], args: dict[str, Scalar], budget: ReuseBudget | None) -> Control | None:
    if not stock:
        return None
    stock_args = frozen_args(stock[0])
    if budget is None and stock_args == args:
        return None
    baseline: Baseline = baseline_of(stock)
    return Control(engine_args=stock_args, baseline=baseline)
