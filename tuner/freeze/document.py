"""A measured setting becomes a frozen document; a frozen document is read from its file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

import tuner
from tuner.domain.experiment import STOCK_ID, Purpose, Results, Round, SettingId, Start, StartState, StudyFile
from tuner.domain.frozen import FROZEN_SCHEMA, Frozen, MeasuredStock, StudyRef
from tuner.domain.measurement import Measurement, metric
from tuner.domain.profile import Profile, is_secret_name
from tuner.domain.setting import CHUNK_KNOB, STOCK, Scalar, Setting
from tuner.domain.workload import workload_sha256
from tuner.errors import FileFormatError, UsageError
from tuner.files import read_json, write_json
from tuner.freeze.export import launcher_of, serve_command, served_model
from tuner.freeze.measured import measured_of

StartRounds = Sequence[tuple[Start, Sequence[Round]]]
"""Starts, each with the rounds of one setting that count; there is none without a round."""

NEVER_FROZEN = frozenset(
    {"host", "port", "uds", "served_model_name", "model", "model_tag", "config", "api_key", "hf_token", "root_path"}
)
"""Options that belong to one start or to one person, not to the configuration."""

_PINNED = (CHUNK_KNOB, "max_num_seqs", "max_model_len", "enable_chunked_prefill", "enable_prefix_caching")
"""Frozen as the engine ran them even when nobody asked for them: their defaults move between vLLM versions."""

_EARLIER_SCHEMA = "chunktune.frozen/1"
_WHERE_FROM = "`chunktune sweep` writes one to results/STUDY/frozen.json, `chunktune freeze -o FILE` to another place."


@dataclass(frozen=True)
class Evidence:
    """What a study measured of a setting, and of stock beside it."""

    starts: StartRounds
    stock: StartRounds
    """In the same starts, where stock was measured in them, else in others of their purpose."""
    literal: Start | None
    """The start with the setting's own command and no live control, where one was made."""
    from_finals: bool
    """False: the setting was in no final, so its numbers are those of the search."""


def evidence_of(results: Results, setting: SettingId) -> Evidence:
    """The finals of a setting, else its search: a search's best number is its luckiest one."""
    finals = _starts_with(results, setting, ("final",), ("completed",))
    purposes: tuple[Purpose, ...] = ("final",) if finals else ("search", "single")
    states: tuple[StartState, ...] = ("completed",)
    if not finals:
        states = ("completed", "engine_failed", "load_failed", "interrupted")
    starts = finals or _starts_with(results, setting, purposes, states)
    stock = _starts_with(results, STOCK_ID, purposes, states)
    numbers = {start.number for start, _ in starts}
    literals = [s for s in results.starts if s.purpose == "literal" and setting in s.settings and s.effective_args]
    return Evidence(
        starts=starts,
        stock=[each for each in stock if each[0].number in numbers] or stock,
        literal=literals[-1] if literals else None,
        from_finals=bool(finals),
    )


def _starts_with(
    results: Results, setting: SettingId, purposes: Sequence[Purpose], states: Sequence[StartState]
) -> list[tuple[Start, list[Round]]]:
    numbers = results.numbers(*purposes, states=states)
    found = [(s, results.kept(setting, starts=[s.number])) for s in results.starts if s.number in numbers]
    return [(start, rounds) for start, rounds in found if rounds]


def freeze_setting(
    *,
    verdict: Literal["better", "stock", "chosen"],
    setting_id: SettingId,
    setting: Setting,
    starts: StartRounds,
    stock: StartRounds,
    study: StudyFile,
    profile: Profile,
    sampler: str,
    counts: Mapping[str, int],
    now: datetime,
    literal: Start | None = None,
) -> Frozen:
    """The frozen form of a setting; UsageError when it has no round, or no value of the objective.

    `starts` and `stock` are the finals. Options are those that the `literal` start read back, where there was one.
    """
    if not starts:
        raise UsageError(
            f"{_name(setting_id, setting)} has no round that counts: there is nothing to freeze",
            "Freeze another setting.",
        )
    measured = measured_of(_by_start(starts))
    _refuse_unmeasured(measured.median, _name(setting_id, setting), profile)
    source = literal or starts[0][0]
    args, budget = frozen_args(setting, profile.engine.args, source), setting.reuse_budget
    revision = study.fingerprint.model_revision or source.model_revision
    return Frozen(
        verdict=verdict,
        setting=setting_id,
        created_at=now.isoformat(timespec="seconds"),
        chunktune_version=tuner.__version__,
        simulated=study.simulated or any(start.simulated for start, _ in starts),
        model=profile.model,
        engine_args=args,
        reuse_budget=budget,
        command=serve_command(launcher_of(source.command), served_model(source.command, profile.model), args, budget),
        engine_env=frozen_env(profile.engine.env),
        startup_timeout_s=profile.engine.startup_timeout,
        hardware=profile.hardware,
        fingerprint=study.fingerprint.model_copy(update={"model_revision": revision}),
        workload=profile.workload,
        workload_sha256=workload_sha256(profile.workload),
        measured=measured,
        stock=_stock(stock, profile),
        objective=profile.objective,
        constraints=profile.constraints,
        regress_metrics=profile.regress_metrics,
        study=StudyRef(name=study.study, counts=dict(counts), sampler=sampler, seed=study.seed),
    )


def _stock(starts: StartRounds, profile: Profile) -> MeasuredStock | None:
    if not starts:
        return None
    args = frozen_args(STOCK, profile.engine.args, starts[0][0])
    return MeasuredStock(**dict(measured_of(_by_start(starts))), engine_args=args)


def _by_start(starts: StartRounds) -> list[list[Measurement]]:
    return [[row.measurement for row in rounds] for _, rounds in starts]


def _name(setting_id: SettingId, setting: Setting) -> str:
    return "stock" if setting.is_stock else f"setting {setting_id} ({setting.label})"


def _refuse_unmeasured(median: Measurement, name: str, profile: Profile) -> None:
    for path in profile.objective.metrics:
        if metric(median, path) is None:
            reason = median.unmeasured.get(path.partition(".")[0], "")
            raise UsageError(f"{name} has no {path}{reason and f': {reason}'}", "Freeze another setting.")


def frozen_args(setting: Setting, base: Mapping[str, Scalar], start: Start) -> dict[str, Scalar]:
    """The options of `setting` as this start ran them: those asked for, with the values read back laid over them.

    `base` is `engine.args` of the profile. What was switched within a live start keeps the setting's value, since
    the engine reads back what it was started with.
    """
    asked = setting.engine_args(base)
    ran = dict(start.effective_args or {})
    if start.live:
        ran |= {name: value for name, value in asked.items() if value != start.engine_args.get(name)}
        ran[CHUNK_KNOB] = asked.get(CHUNK_KNOB) or start.stock_chunk
    named = {name: ran.get(name, value) for name, value in asked.items()}
    named |= {name: ran[name] for name in _PINNED if ran.get(name) is not None}
    return {n: v for n, v in named.items() if v is not None and n not in NEVER_FROZEN and not n.startswith("ssl_")}


def frozen_env(env: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment without anything that looks like a secret, and without our own switches."""
    ours = ("CHUNKTUNE_", "VLLM_SERVER_DEV_MODE")
    return {name: value for name, value in env.items() if not is_secret_name(name) and not name.startswith(ours)}


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
            f"{path}: workload: it is not the load that the setting was measured with (workload_sha256 differs)",
            "Undo the edit, or sweep with the new load and freeze that.",
        )
    return frozen


def _read(path: Path) -> dict[str, Any]:
    inside = path / "frozen.json"
    if os.path.isdir(path):
        hint = f"Name the one in it: {inside}" if os.path.isfile(inside) else _WHERE_FROM
        raise FileFormatError(f"{path} is a folder, a frozen file was expected", hint)
    try:
        value = read_json(path)
        if value.get("schema") == _EARLIER_SCHEMA:
            raise FileFormatError(
                f"{path} was written by an earlier chunktune ({_EARLIER_SCHEMA})",
                "Run `chunktune sweep` again and freeze its result; `regress --rebase` then works on the new file.",
            )
        return read_json(path, schema=FROZEN_SCHEMA)
    except FileFormatError as error:
        raise FileFormatError(error.message, error.hint or _WHERE_FROM) from None


def save_frozen(path: Path, frozen: Frozen) -> None:
    """Write the document whole."""
    write_json(path, frozen.to_json())
