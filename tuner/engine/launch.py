"""`vllm serve` as a process: started, proven ready, read back, and ended on every path."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from aiohttp import ClientSession

import tuner
from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.experiment import Diagnosis
from tuner.domain.setting import ReuseBudget, Scalar
from tuner.engine.argv import to_argv
from tuner.engine.diagnosis import cause, diagnose
from tuner.engine.effective import EffectiveConfig, blobs_folder, cached_revision, difference, from_log, read_log
from tuner.engine.installed import resolve_launcher
from tuner.engine.leftovers import Record, record
from tuner.engine.live import LiveControl
from tuner.engine.logs import last_words
from tuner.engine.processes import TERM_WAIT_S, Family, ProcessId, alive, end_family, identify, kill_family, name_of
from tuner.engine.progress import LONGEST, Progress
from tuner.engine.ranks import size
from tuner.engine.readiness import is_ready, open_client, read_back, reset_prefix_cache, send_one_token
from tuner.errors import EngineError, UsageError
from tuner.scheduler.folder import make_folder
from tuner.scheduler.messages import BUDGET_VARIABLE, FOLDER_VARIABLE, LIVE_CLASS, MessageError

__all__ = ["EffectiveConfig", "LaunchSpec", "RunningEngine", "command_line", "launched"]

HOST: Final = "127.0.0.1"
SCHEDULER_CLASS: Final = "tuner.scheduler.ReuseBudgetScheduler"
OURS: Final = frozenset({"host", "port", "served_model_name", "uds", "config", "model", "model_tag", "headless"})
"""Options that the engine room sets itself, or that would take the server away from it."""
_TRAMPOLINE = Path(__file__).with_name("trampoline.py")
_LOG_FORMAT = ("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_PREFIX")
"""Variables that change or remove the form of vLLM's log, which is read for causes and effective values."""
_PORT_WAIT_S = 5.0
_MEMORY_WAIT_S = 60.0
_FIRST_TICK_S = 0.03
_SLOWEST_TICK_S = 0.5
_WATCH_S = 0.1


@dataclass(frozen=True)
class LaunchSpec:
    """One engine to start. `args` are vLLM options in snake case; `env` is laid over this process's own."""

    launcher: tuple[str, ...]
    kind: Literal["vllm", "sim"]
    model: str
    args: dict[str, Scalar]
    env: dict[str, str]
    log_path: Path
    startup_timeout_s: float
    record_dir: Path
    reuse_budget: ReuseBudget | None = None
    budget_in_environment: bool = False
    """The reuse budget goes by an environment variable, and costs no compilation; else by `--additional-config`."""
    live: bool = False
    """Started with the live scheduler, which switches settings and reuse budgets within the start."""
    extra_argv: tuple[str, ...] = ()
    term_wait_s: float = TERM_WAIT_S
    """How long the engine may take to end in order before it is killed."""


def command_line(spec: LaunchSpec, port: int, served_name: str = "chunktune") -> list[str]:
    """The whole command. UsageError for an option that is the engine room's own, or a secret.

    `enable_prompt_tokens_details` is added because a round has to see what was cached.
    """
    for key in spec.args:
        if key in OURS:
            raise UsageError(f"engine.args.{key}: chunktune sets this option itself", "Take it out of the profile.")
        if key in ("api_key", "hf_token"):
            raise UsageError(
                f"engine.args.{key}: a secret does not belong on a command line",
                "Take it out of the profile; HF_TOKEN is read from the environment.",
            )
    args: dict[str, Any] = {"enable_prompt_tokens_details": True, **spec.args}
    if spec.live:
        if spec.args.get("scheduler_cls") is not None:
            raise UsageError("engine.args.scheduler_cls: a live start has a scheduler of its own", "Use --no-live.")
        args["scheduler_cls"] = LIVE_CLASS
    elif _budgeted(spec) and spec.reuse_budget is not None:
        args["scheduler_cls"] = SCHEDULER_CLASS
        if not spec.budget_in_environment:
            args["additional_config"] = _with_budget(spec.args.get("additional_config"), spec.reuse_budget)
    own = ["--host", HOST, "--port", str(port), "--served-model-name", served_name]
    return [*spec.launcher, "serve", spec.model, *to_argv(args), *spec.extra_argv, *own]


def _engines(spec: LaunchSpec) -> int:
    """Data-parallel engines, each with a scheduler of its own."""
    return size(spec.args, "data_parallel_size")


def _budgeted(spec: LaunchSpec) -> bool:
    return spec.reuse_budget is not None and not spec.reuse_budget.off


def _with_budget(existing: Scalar, budget: ReuseBudget) -> str:
    try:
        config = json.loads(existing) if isinstance(existing, str) else {}
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UsageError("engine.args.additional_config: write a JSON object")
    return json.dumps({**config, "chunktune": budget.to_json()}, separators=(",", ":"), sort_keys=True)


def environment(spec: LaunchSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: `base` with the spec's laid over it, and what reading it back needs."""
    env = {**base, **spec.env}
    # With a key the server would refuse our own requests; it listens on loopback only.
    env.pop("VLLM_API_KEY", None)
    env["VLLM_SERVER_DEV_MODE"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    # With data parallelism vLLM gives its engines 600 s of its own, whatever our deadline says.
    env.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(math.ceil(LONGEST * spec.startup_timeout_s)))
    if not env.get("VLLM_PORT", "").isdecimal():
        # Kubernetes sets it to tcp://... in every pod beside a Service named vllm.
        env.pop("VLLM_PORT", None)
    for name in (*_LOG_FORMAT, BUDGET_VARIABLE):
        env.pop(name, None)
    if spec.budget_in_environment and spec.reuse_budget is not None and not spec.live:
        env[BUDGET_VARIABLE] = json.dumps(spec.reuse_budget.to_json(), sort_keys=True)
    if env.get("VLLM_LOGGING_LEVEL", "INFO").upper() not in ("DEBUG", "INFO"):
        env["VLLM_LOGGING_LEVEL"] = "INFO"
    if spec.kind == "vllm" and (spec.live or _budgeted(spec)):
        folder = str(plugin_folder(spec.record_dir))
        env["PYTHONPATH"] = os.pathsep.join(p for p in (folder, env.get("PYTHONPATH", "")) if p)
    return env


def plugin_folder(parent: Path) -> Path:
    """A folder for PYTHONPATH that holds only the scheduler plug-in, so that nothing else of this
    environment gets into the engine's."""
    package = parent.resolve() / "plugin" / "tuner"
    package.mkdir(parents=True, exist_ok=True)
    source = Path(tuner.__file__).parent
    shutil.copyfile(source / "__init__.py", package / "__init__.py")
    shutil.copytree(
        source / "scheduler", package / "scheduler", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    return package.parent


class RunningEngine:
    """An engine that was started and is ready; made by `launched` only.

    `start_s` is the time from its start until it was ready and read back. `model_id` is what requests have to name: a
    name made up for this start, so that no other server on the port can pass for it.
    """

    effective: EffectiveConfig = EffectiveConfig()
    start_s: float = 0.0

    def __init__(
        self,
        spec: LaunchSpec,
        command: list[str],
        port: int,
        model_id: str,
        child: subprocess.Popen[bytes],
        clock: Clock,
        live_folder: Path | None = None,
    ) -> None:
        self.base_url = f"http://{HOST}:{port}"
        self.port = port
        self.pid = child.pid
        self.model_id = model_id
        self.log_path = spec.log_path
        self.command = command
        self.asked = dict(spec.args)
        self._spec = spec
        self._child = child
        self._clock = clock
        self._family: Family | None = None
        self._record: Record | None = None
        self._cores: list[ProcessId] = []
        self._death: Diagnosis | None = None
        self._stopping = False
        self.live = None if live_folder is None else LiveControl(live_folder, _engines(spec), self._probe, clock)

    async def reset_prefix_cache(self) -> None:
        """Make the next round begin as it does after a switch: with an empty cache, not one to be evicted first."""
        await reset_prefix_cache(self.base_url)

    async def _probe(self, engine: int) -> None:
        """One request of one token, to this data-parallel engine; EngineError when the engine has died."""
        headers = {"X-data-parallel-rank": str(engine)} if _engines(self._spec) > 1 else {}
        await send_one_token(self.base_url, self.model_id, headers)
        death = self.exited()
        if death is not None:
            raise EngineError(death)

    def exited(self) -> Diagnosis | None:
        """Why it ended, or None while it runs. An exit that was not asked for is a failure even with code 0,
        and so is the end of an engine process behind a living API server."""
        return self._look("load")

    async def wait_died(self) -> Diagnosis:
        """Completes when it ends without being asked to."""
        while True:
            death = self.exited()
            if death is not None:
                return death
            await self._clock.sleep(_WATCH_S)

    def process_ids(self) -> list[int]:
        """Pids of all its living processes."""
        return [] if self._family is None else [p.pid for p in self._family.refresh()]

    def log_lines(self) -> list[str]:
        """Its log; of a very long one the beginning and the end."""
        return list(read_log(self.log_path))

    def failed(self, diagnosis: Diagnosis) -> Diagnosis:
        """A diagnosis that says where the log is."""
        hint = f"{diagnosis.hint} The log is {self.log_path}.".strip()
        return diagnosis.model_copy(update={"log_path": str(self.log_path), "hint": hint})

    def _look(self, phase: Literal["start", "load"]) -> Diagnosis | None:
        if self._death is not None or self._stopping:
            return self._death
        code = self._child.poll()
        if code is not None or any(not alive(core) for core in self._cores):
            self._death = self.failed(diagnose(self.log_lines(), code, phase=phase))
        return self._death

    async def _become_ready(self, on_wait: Callable[[str], None] | None) -> None:
        root = identify(self.pid)
        if root is not None:
            self._family = Family(root)
            self._record = record(self._spec.record_dir, root)
        started_s = self._clock.monotonic_s()
        env = {**os.environ, **self._spec.env}
        progress = Progress(self.log_path, blobs_folder(self._spec.model, env), self._spec.startup_timeout_s, started_s)
        tick = _FIRST_TICK_S
        async with open_client() as client:
            while True:
                death = self._look("start")
                if death is not None:
                    raise EngineError(death)
                if await self._is_ready(client):
                    break
                if over := progress.over(self._clock.monotonic_s()):
                    raise EngineError(self.failed(self._too_late(over)))
                if on_wait is not None and (told := progress.told(self._clock.monotonic_s())):
                    on_wait(told)
                await self._clock.sleep(tick)
                tick = min(tick * 1.3, _SLOWEST_TICK_S)
            effective = await read_back(client, self.base_url, from_log(self.log_lines()), self._spec.args)
        revision = effective.model_revision or cached_revision(self._spec.model, env)
        self.effective = EffectiveConfig(**{**vars(effective), "model_revision": revision})
        self.start_s = self._clock.monotonic_s() - started_s
        if self._family is not None:
            self._cores = [p for p in self._family.refresh() if (name_of(p) or "").startswith("VLLM::")]
        differs = difference(self._spec.args, self.effective.args)
        if differs is not None:
            raise EngineError(self.failed(differs))

    async def _is_ready(self, client: ClientSession) -> bool:
        try:
            return await is_ready(client, self.base_url, self.model_id)
        except EngineError as error:
            raise EngineError(self.failed(error.diagnosis)) from None

    def _too_late(self, over: str) -> Diagnosis:
        lines = self.log_lines()
        known = diagnose(lines, None, phase="start")
        if known.code not in ("unknown", "engine_died"):
            return known  # It hangs over a failure that it has already written down.
        last = last_words(lines, 1)
        said = f"the last line of its log is: {last[0]}" if last else "its log is empty"
        late = cause("startup_timeout", f"{over}; {said}")
        return late.model_copy(update={"tail": last_words(lines)})

    async def _stop(self, memory_is_back: Callable[[], bool] | None) -> None:
        """End every process, then wait until the port is free and the memory is back; all bounded."""
        self._stopping = True
        left: list[ProcessId] = []
        if self._family is not None:
            left = await end_family(
                self._family, reap=self._child.poll, clock=self._clock, term_wait_s=self._spec.term_wait_s
            )
        elif self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        if left:
            pids = ", ".join(str(p.pid) for p in left)
            raise EngineError(self.failed(cause("not_stopped", f"pid {pids}")))
        if self._record is not None:
            self._record.remove()
        if not await _until(lambda: port_is_free(self.port), _PORT_WAIT_S, self._clock) and await self._still_serves():
            where = f"port {self.port} still answers, although every process that was started has ended"
            raise EngineError(self.failed(cause("not_stopped", where)))
        if memory_is_back is not None:
            await _until(memory_is_back, _MEMORY_WAIT_S, self._clock)

    async def _still_serves(self) -> bool:
        """Whether this very engine answers, out of a container or another daemon, and not a stranger on its port."""
        async with open_client() as client:
            return await is_ready(client, self.base_url, self.model_id)

    def _kill(self) -> None:
        if self._family is not None:
            kill_family(self._family, reap=self._child.poll)


@asynccontextmanager
async def launched(
    spec: LaunchSpec,
    clock: Clock = SYSTEM_CLOCK,
    *,
    memory_is_back: Callable[[], bool] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> AsyncIterator[RunningEngine]:
    """A ready engine for the length of the block; its orderly end is guaranteed on every way out.

    EngineError when it does not become ready, runs other values than asked for, or cannot be ended.
    UsageError when the command is not there. After the end its port is free, every process that was ever
    seen is gone, and `memory_is_back` (when given) was waited for, for a minute at most. A cancellation
    waits for the end too. `on_wait` is told every minute what a slow start is doing.
    """
    folder = _live_folder(spec)
    try:
        engine = _spawn(spec, clock, folder)
        try:
            await engine._become_ready(on_wait)
            yield engine
        except BaseException:
            await _finish(engine._stop(memory_is_back), engine._kill)
            raise
        await _finish(engine._stop(memory_is_back), engine._kill)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _live_folder(spec: LaunchSpec) -> Path | None:
    """A new folder for the commands of a live start; UsageError where nobody can be kept out of it."""
    if not spec.live:
        return None
    spec.record_dir.mkdir(parents=True, exist_ok=True)
    try:
        return make_folder(spec.record_dir.resolve() / f"live-{os.getpid()}-{secrets.token_hex(4)}")
    except (MessageError, OSError) as error:
        raise UsageError(str(error), "Choose another folder with --out DIR, or use --no-live.") from None


def _spawn(spec: LaunchSpec, clock: Clock, live_folder: Path | None) -> RunningEngine:
    env = environment(spec, os.environ)
    if live_folder is not None:
        env[FOLDER_VARIABLE] = str(live_folder)
    resolve_launcher(spec.launcher, spec.env)
    port = free_port()
    model_id = f"chunktune-{secrets.token_hex(4)}"
    command = command_line(spec, port, model_id)
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_TRAMPOLINE), str(os.getpid()), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    return RunningEngine(spec, command, port, model_id, child, clock, live_folder)


async def _finish(work: Coroutine[Any, Any, None], kill: Callable[[], None]) -> None:
    """Run to the end whatever is cancelled meanwhile, then pass the cancellation on. When the loop itself
    shuts down and cancels `work` too, `kill` is the last resort."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if task.cancelled():
        kill()
    if cancelled is not None:
        raise cancelled
    task.result()


async def _until(condition: Callable[[], bool], wait_s: float, clock: Clock) -> bool:
    deadline_s = clock.monotonic_s() + wait_s
    tick = 0.02
    while not condition():
        if clock.monotonic_s() >= deadline_s:
            return False
        await clock.sleep(tick)
        tick = min(tick * 1.5, 0.5)
    return True


def free_port() -> int:
    """A port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """True when a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
