"""The machine around a sweep: ports, proxies, the model's token, template and files, /dev/shm, disk, open files."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from tuner.doctor.line import Line, ok, warning, wrong
from tuner.doctor.ranks import largest_args
from tuner.domain.profile import Profile
from tuner.engine.effective import cached_revision, hub_folder
from tuner.engine.launch import free_port, port_is_free
from tuner.engine.ranks import gpus_of_node

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_GIB = 1 << 30
_LITTLE_DISK = 1 * _GIB
_NO_DISK = 100 << 20
_SHM = Path("/dev/shm")
_LITTLE_SHM = 1 * _GIB
_BILLIONS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)B\b", re.IGNORECASE)
"""The parameters in a model's name: `70B`."""
_BITS = {
    4: re.compile(r"awq|gptq|int4|fp4|w4a", re.IGNORECASE),
    8: re.compile(r"fp8|int8|w8a", re.IGNORECASE),
}
"""Bits of a parameter by what names of quantized models say; most others are published in 16."""


def judge_surroundings(profile: Profile, out: Path, env: Mapping[str, str], *, simulated: bool) -> list[Line]:
    """`env` is what an engine would see; values of proxies and tokens are never shown.

    The simulated engine loads no model, so nothing is asked about the model's files.
    """
    model = [] if simulated else [_token(profile, env), _template(profile, env), _weights(profile, env), _shm(profile)]
    return [_port(), proxies(env), *model, _disk(out), _open_files(profile)]


def _port() -> Line:
    try:
        port = free_port()
    except OSError as error:
        return wrong(
            "ports", f"no port on 127.0.0.1 can be had: {error.strerror}", "Look at `ss -s`; free some sockets."
        )
    if not port_is_free(port):
        return warning("ports", f"a port that was free a moment ago ({port}) is taken", "Look who opens ports so fast.")
    return ok("ports", "free ports on 127.0.0.1 are there; each start takes one of its own")


def proxies(env: Mapping[str, str]) -> Line:
    """Which proxy variables are set, and whether loopback is exempt. chunktune itself ignores them there."""
    found = [name for name in (*PROXIES, *(p.lower() for p in PROXIES)) if env.get(name)]
    if not found:
        return ok("proxy", "no proxy variable is set")
    exempt = (env.get("NO_PROXY") or env.get("no_proxy") or "").replace(" ", "").split(",")
    if "*" in exempt or "127.0.0.1" in exempt or "localhost" in exempt:
        return ok("proxy", f"{', '.join(found)} set, loopback is exempt")
    return warning(
        "proxy",
        f"{', '.join(found)} set, loopback not exempt: chunktune ignores them for 127.0.0.1, other clients do not",
        "export NO_PROXY=127.0.0.1,localhost",
    )


def _token(profile: Profile, env: Mapping[str, str]) -> Line:
    check = "HF_TOKEN"
    if _is_local(profile.model):
        return ok(check, f"not needed: {profile.model} is a folder here")
    if any(env.get(name) for name in _TOKENS) or _token_file(env).exists():
        return ok(check, "set (its value is not shown)")
    if cached_revision(profile.model, env) is not None:
        return ok(check, f"not set, and not needed: {profile.model} is in the local cache")
    if env.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
        return wrong(
            check,
            f"{profile.model} is not in the local cache and HF_HUB_OFFLINE forbids to fetch it",
            "Download it first (hf download MODEL), or unset HF_HUB_OFFLINE.",
        )
    return warning(
        check,
        f"not set; {profile.model} is not in the local cache and has to be fetched",
        "If the model is gated or private: accept its terms, then export HF_TOKEN.",
    )


def _token_file(env: Mapping[str, str]) -> Path:
    return Path(env.get("HF_TOKEN_PATH") or hub_folder(env).parent / "token")


def _is_local(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or Path(model).is_dir()


def model_folder(model: str, env: Mapping[str, str]) -> Path | None:
    """Where the model's files lie: its own folder, or its snapshot in the cache; None when they are not here."""
    if _is_local(model):
        folder = Path(model).expanduser()
        return folder if folder.is_dir() else None
    commit = cached_revision(model, env)
    if commit is None:
        return None
    folder = hub_folder(env) / f"models--{model.replace('/', '--')}" / "snapshots" / commit
    return folder if folder.is_dir() else None


def _template(profile: Profile, env: Mapping[str, str]) -> Line:
    check = "chat template"
    if profile.workload.api != "chat":
        return ok(check, "not needed: workload.api is completions")
    if profile.engine.args.get("chat_template"):
        return ok(check, "given by engine.args.chat_template")
    folder = model_folder(profile.model, env)
    if folder is None:
        return warning(
            check,
            f"the files of {profile.model} are not here, so its chat template cannot be seen",
            "Without one every chat request is a 400: then set workload.api to completions.",
        )
    if has_chat_template(folder):
        return ok(check, f"{profile.model} has one")
    return wrong(
        check,
        f"{profile.model} has no chat template: every chat request is a 400",
        "Set workload.api to completions, or give one with engine.args.chat_template.",
    )


def has_chat_template(folder: Path) -> bool:
    """Whether a model's folder carries a chat template, in any of the places where vLLM looks."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("chat_template")) if isinstance(config, dict) else False


def _weights(profile: Profile, env: Mapping[str, str]) -> Line:
    """Whether the model's files are here, or have room."""
    check, model = "model files", profile.model
    if model_folder(model, env) is not None:
        return ok(check, f"{model} is on this disk")
    folder = _existing(hub_folder(env))
    free = shutil.disk_usage(folder).free
    billions = _BILLIONS.search(model)
    bits = next((bits for bits, mark in _BITS.items() if mark.search(model)), 16)
    needed = float(billions[1]) * 1e9 * bits / 8 if billions else 0.0
    text = f"{model} has to be downloaded to {hub_folder(env)}, which has {free / _GIB:.0f} GiB free"
    if free < needed:
        return wrong(
            check,
            f"{text}; by its name it takes some {needed / _GIB:.0f} GiB",
            "Free some space there, or point HF_HOME at a larger disk.",
        )
    return warning(check, text, f"Run `hf download {model}` first: it shows a progress bar, a start does not.")


def _shm(profile: Profile) -> Line:
    """vLLM's ranks and NCCL exchange messages there; Docker gives 64 MiB where nobody asks for more."""
    check = "/dev/shm"
    ranks = gpus_of_node(largest_args(profile))
    if ranks == 1 or not _SHM.is_dir():
        return ok(check, "not needed by one GPU" if ranks == 1 else "not there")
    free = shutil.disk_usage(_SHM).free
    if free < _LITTLE_SHM:
        return wrong(
            check,
            f"{free >> 20} MiB free, too little for an engine of several GPUs",
            "Start the container with --ipc=host or --shm-size=16g; in Kubernetes mount an emptyDir of medium Memory.",
        )
    return ok(check, f"{free / _GIB:.1f} GiB free")


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _disk(out: Path) -> Line:
    folder = _existing(out)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return wrong("disk", f"results cannot be written to {out}", "Choose another folder with --out DIR.")
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free for {out}"
    if free < _NO_DISK:
        return wrong("disk", text, "Free some space: logs and rounds of one sweep take some 100 MB.")
    if free < _LITTLE_DISK:
        return warning("disk", text, "Free some space before a long sweep: logs and rounds grow.")
    return ok("disk", text)


def _open_files(profile: Profile) -> Line:
    needed = profile.workload.peak_concurrency + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ok("open files", f"{soft} allowed, some {needed} needed")
    return wrong(
        "open files",
        f"{soft} allowed, some {needed} needed for {profile.workload.peak_concurrency} connections",
        f"ulimit -n {min(max(needed, 65535), hard)}",
    )
