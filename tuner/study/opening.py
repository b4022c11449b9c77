"""A study's folder is opened: made, or continued when it is the same study, or refused with the reason."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tuner
from tuner.clock import Clock
from tuner.domain.experiment import Fingerprint, StudyFile
from tuner.domain.profile import Profile
from tuner.domain.workload import workload_sha256
from tuner.errors import FileFormatError, UsageError
from tuner.experiment.store import Store
from tuner.files import write_json

_MAY_CHANGE = {"budget", "description", "regress_metrics"}
"""Fields of a profile that a continued study may change: none of them changes what a round measured."""


def study_path(out: Path, name: str, *, fresh: bool) -> Path:
    """Where a study of that name lies; with `fresh`, the first free name after it, so that nothing is lost."""
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise UsageError(f"{name!r} cannot be the name of a study: it becomes a folder", "Use --study NAME.")
    path = out / name
    if not fresh:
        return path
    number = 2
    while path.exists():
        path = out / f"{name}-{number}"
        number += 1
    return path


@contextmanager
def exclusive(path: Path) -> Iterator[Store]:
    """The folder, locked against a second sweep. The kernel drops the lock when its holder dies."""
    store = Store(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(store.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(
            f"results cannot be written to {path}: {error.strerror}", "Choose another folder with --out DIR."
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another chunktune is running on {path}", "Wait for it, or give this one --study NAME."
            ) from None
        yield store
    finally:
        os.close(handle)


def open_or_create(
    store: Store, profile: Profile, fingerprint: Fingerprint, design: dict[str, Any], *, seed: int, clock: Clock
) -> StudyFile:
    """The study's document, made when it is not there; `design` is what it says of how settings are chosen.

    UsageError names the field in which an existing study differs in space, workload, model, engine or design.
    """
    wanted = StudyFile(
        study=store.path.name,
        profile=profile.to_json(),
        fingerprint=fingerprint,
        workload_sha256=workload_sha256(profile.workload),
        engine_kind=fingerprint.engine,
        simulated=fingerprint.engine == "sim",
        versions={
            "chunktune": tuner.__version__,
            "python": platform.python_version(),
            "optuna": version("optuna"),
            "engine": fingerprint.vllm_version or "unknown",
        },
        design=design,
        seed=seed,
        created_at=clock.now().isoformat(timespec="seconds"),
    )
    found = check_continuable(store, profile, fingerprint, design, seed=seed)
    if found is None:
        write_json(store.study_file, wanted.to_json())
        return wanted
    if (found.profile, found.design) != (wanted.profile, wanted.design):
        found = found.model_copy(update={"profile": wanted.profile, "design": wanted.design})
        write_json(store.study_file, found.to_json())
    return found


def check_continuable(
    store: Store, profile: Profile, fingerprint: Fingerprint, design: dict[str, Any], *, seed: int
) -> StudyFile | None:
    """The study that is there, None where there is none; UsageError names the field in which it differs."""
    if not store.study_file.exists():
        _refuse_foreign(store)
        return None
    found = store.study()
    difference = _difference(found, profile.to_json(), fingerprint, seed)
    before, now = found.design.get("live"), design.get("live")
    if difference is None and before != now:
        difference = f"live switching (--no-live): it has {_short(before)}, now it would be {_short(now)}"
    if difference:
        raise UsageError(
            f"{store.path} holds a study that differs in {difference}",
            "Start a new one with --fresh (nothing is deleted), or name it with --study NAME.",
        )
    return found


def _refuse_foreign(store: Store) -> None:
    if not store.path.is_dir():
        return
    ours = {store.lock_file.name, store.record_dir.name, store.journal_file.name}
    strangers = sorted(f.name for f in store.path.iterdir() if f.name not in ours)
    if strangers:
        raise FileFormatError(
            f"{store.path} is no study of chunktune: it holds {', '.join(strangers[:3])} but no study.json",
            "Choose another --out or --study; nothing was written there.",
        )


def _difference(found: StudyFile, profile: dict[str, Any], fingerprint: Fingerprint, seed: int) -> str | None:
    for field in ("engine", "model", "vllm_version", "gpus", "driver_version"):
        before, now = getattr(found.fingerprint, field), getattr(fingerprint, field)
        if before is not None and now is not None and before != now:
            return f"{field}: it has {_short(before)}, now it would be {_short(now)}"
    for field in sorted(set(found.profile) | set(profile)):
        if field in _MAY_CHANGE:
            continue
        before, now = found.profile.get(field), profile.get(field)
        if before != now:
            path, old, new = _first_difference(field, before, now)
            return f"{path}: it has {_short(old)}, now it would be {_short(new)}"
    if found.seed != seed:
        return f"the seed: it has {found.seed}, now it would be {seed}"
    return None


def _first_difference(path: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(set(before) | set(now)):
            if before.get(key) != now.get(key):
                return _first_difference(f"{path}.{key}", before.get(key), now.get(key))
    return path, before, now


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
