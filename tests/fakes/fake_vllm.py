#!/usr/bin/env python3
"""A stand-in for the `vllm` command: its argv, log lines, exit codes and API, and faults on demand.

Standard library only, so that it starts in a tenth of a second under any Python; live control comes from the folder
that chunktune puts on its PYTHONPATH. Environment
`FAKE_VLLM` holds its script: JSON, or the path of a JSON file. Every key is optional.

    time_scale          every time below is multiplied by this (default 1)
    state               a folder that outlives a start: counts starts, needed for `times`
    version             what `--version` says (default 0.32.0); one that is not known cannot be switched live
    unknown_options     options (dashed, without `--`) that this version does not have
    ready_after_s       time until it listens
    start               list of faults; the first one that applies is played:
                          {log: NAME, exit: CODE, after_s, times, chunk_below, chunk_above}
                        prints tests/unit/engine/logs/NAME.log (or `text`) and exits; {hang: true} never gets ready;
                        {signal: N} ends by that signal
    load                list of faults under load, each {after_requests: N, times, chunk_below, chunk_above} with
                          exit: CODE (and log/text before it), stall: true, kill_core: true; the chunk is that of the
                          moment
    live                {refuses_chunk: N}, {forgets_chunk: N} (says that it runs what it ran before), {silent: true};
                          with {engine: N} only that data-parallel engine does so
    node                the log, the processes and the memory of a start on a GPU node (see gpu_node/node.py)
    core                "none" (default), "polite", "stubborn" (ignores TERM), "escaping" (a session of its own too)
    ignore_term         the API server ignores TERM
    log_chunk           the chunk that log and /server_info claim, whatever argv says
    block_size          default 16
    kv_tokens           KV capacity (default 200,000)
    ttft_ms             default 3; ttft_ms_by_chunk {"512": 5}; ttft_factors: by number of start, cyclic
    token_ms, first_slow {requests, ms}
    remember {unseen_ms, seen_ms}: by the first block of the prompt
    role_delay_ms_per_1000_chunk: the role delta of a chat comes after chunk/1000 of this
    cached_tokens (whether usage has them), empty_share, error_event_share, cut_share, http_error_share,
    chat_template (false: chat is a 400), token_ids (false: a 400), api_key: 401 without it
    metrics, server_info  "error": a 500
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fake_vllm_api import Api, Engine
from gpu_node.node import Node

LOGS = Path(__file__).resolve().parent.parent / "unit" / "engine" / "logs"
VALUES = {
    "host": str,
    "port": int,
    "served-model-name": str,
    "max-num-batched-tokens": int,
    "max-num-seqs": int,
    "max-model-len": int,
    "long-prefill-token-threshold": int,
    "max-num-scheduled-tokens": int,
    "max-num-active-seqs": int,
    "block-size": int,
    "num-gpu-blocks-override": int,
    "kv-cache-memory-bytes": int,
    "gpu-memory-utilization": float,
    "watermark": float,
    "tensor-parallel-size": int,
    "pipeline-parallel-size": int,
    "data-parallel-size": int,
    "seed": int,
    "dtype": str,
    "load-format": str,
    "tokenizer": str,
    "chat-template": str,
    "scheduling-policy": str,
    "scheduler-cls": str,
    "additional-config": str,
    "worker-cls": str,
}
FLAGS = (
    "enable-chunked-prefill",
    "enable-prefix-caching",
    "enforce-eager",
    "async-scheduling",
    "enable-prompt-tokens-details",
    "trust-remote-code",
    "long-prefill-token-threshold-adaptive",
    "enable-log-requests",
    "scheduler-reserve-full-isl",
)


def main() -> None:
    """The command."""
    words = sys.argv[1:]
    script = load_script()
    if words[:1] in (["--version"], ["-v"]):
        print(script.get("version", "0.32.0"))
        return
    if words[:1] != ["serve"]:
        usage_error("vllm", f"argument subcommand: invalid choice: {words[:1]}")
    if any(w.startswith("--help") or w == "-h" for w in words):
        print_help(script)
        return
    start_number = count(Path(script["state"]) if "state" in script else None, "starts")
    model, options = parse(words[1:], script)
    serve(model, options, script, start_number)


def load_script() -> dict[str, Any]:
    """The script out of the environment."""
    text = os.environ.get("FAKE_VLLM", "").strip()
    if text and not text.startswith("{"):
        text = Path(text).read_text()
    script: dict[str, Any] = json.loads(text) if text else {}
    return script


def has_option(name: str, script: dict[str, Any]) -> bool:
    """Whether this version has it."""
    return name not in script.get("unknown_options", ()) and (name in VALUES or name in FLAGS)


def print_help(script: dict[str, Any]) -> None:
    """As `vllm serve --help=all`."""
    print("usage: vllm serve [model_tag] [options]\n\noptions:")
    for name in VALUES:
        if has_option(name, script):
            print(f"  --{name} {name.upper().replace('-', '_')}\n                        See --no-such-option too.")
    for name in FLAGS:
        if has_option(name, script):
            print(f"  --{name}, --no-{name}\n                        A switch. (default: None)")
    print("  -h, --help            show this help message and exit")


def usage_error(program: str, message: str) -> None:
    """As argparse does it."""
    sys.stderr.write(f"usage: {program} [model_tag] [options]\n{program}: error: {message}\n")
    sys.exit(2)


def parse(words: list[str], script: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model, and the options under dashed names."""
    model, options = "", {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            model = word
            continue
        name, joined, value = word[2:].partition("=")
        if has_option(name, script) and name in VALUES:
            if not joined:
                value = words[at] if at < len(words) else ""
                at += 1
            try:
                options[name] = VALUES[name](value)
            except ValueError:
                usage_error("vllm serve", f"argument --{name}: invalid {VALUES[name].__name__} value: {value!r}")
        elif has_option(name, script) or has_option(name.removeprefix("no-"), script):
            options[name.removeprefix("no-")] = not name.startswith("no-")
        else:
            usage_error("vllm", f"unrecognized arguments: {word}")
    return model, options


def log(text: str, process: str = "APIServer", where: str = "api_utils.py:286") -> None:
    """One line as vLLM writes it."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={os.getpid()}) INFO {stamp} [{where}] {text}", flush=True)


def say(fault: dict[str, Any]) -> None:
    """The last words of a fault."""
    text = (LOGS / f"{fault['log']}.log").read_text() if "log" in fault else fault.get("text", "")
    sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")
    sys.stdout.flush()


class Faults:
    """Which faults of a list apply to this start; `times` is counted in the state folder."""

    def __init__(self, script: dict[str, Any], kind: str) -> None:
        self._kind = kind
        self._state = Path(script["state"]) if "state" in script else None
        self._faults = [fault for number, fault in enumerate(script.get(kind, ())) if self._left(number, fault)]

    def applying(self, chunk: int) -> list[dict[str, Any]]:
        """Those of an engine that runs this chunk."""
        return [f for f in self._faults if f.get("chunk_above", 0) < chunk < f.get("chunk_below", float("inf"))]

    def _left(self, number: int, fault: dict[str, Any]) -> bool:
        return "times" not in fault or count(self._state, f"{self._kind}-{number}", peek=True) < fault["times"]

    def play(self, fault: dict[str, Any], script: dict[str, Any]) -> None:
        """Count it as used up once."""
        if "times" in fault:
            count(self._state, f"{self._kind}-{script[self._kind].index(fault)}")


def count(state: Path | None, name: str, *, peek: bool = False) -> int:
    """How often this was called for `name` before, over all starts."""
    if state is None:
        return 0
    state.mkdir(parents=True, exist_ok=True)
    path = state / name
    before = path.stat().st_size if path.exists() else 0
    if not peek:
        with path.open("ab") as file:
            file.write(b".")
    return before


def end(fault: dict[str, Any]) -> None:
    """Exit as the fault says."""
    say(fault)
    if "signal" in fault:
        signal.signal(fault["signal"], signal.SIG_DFL) if fault["signal"] != signal.SIGKILL else None
        os.kill(os.getpid(), fault["signal"])
    os._exit(fault.get("exit", 1))


def start_core(kind: str) -> int | None:
    """A grandchild of the tuner that calls itself VLLM::EngineCore, as vLLM's does."""
    if kind == "none":
        return None
    pid = os.fork()
    if pid:
        return pid
    if kind == "escaping":
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL if kind == "polite" else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(15, b"VLLM::EngineCore", 0, 0, 0)
    end_s = time.monotonic() + 120  # Nobody's for ever, whatever the test does.
    while time.monotonic() < end_s:
        time.sleep(0.2)
    os._exit(0)


def serve(model: str, options: dict[str, Any], script: dict[str, Any], start_number: int) -> None:
    """From the first log line to the end."""
    scale = script.get("time_scale", 1.0)
    log(f"version {script.get('version', '0.32.0')}".rjust(40), where="api_utils.py:347")
    log(f"non-default args: {options}")
    check_values(options)
    if script.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    node = Node(options, script["node"]) if "node" in script else None
    core = start_core(script.get("core", "none")) if node is None else node.start()
    faults = Faults(script, "start")
    for fault in faults.applying(options.get("max-num-batched-tokens", 8192)):
        faults.play(fault, script)
        time.sleep(fault.get("after_s", 0) * scale)
        if fault.get("hang"):
            log("Waiting for 1 local, 0 remote core engine proc(s) to start.", where="utils.py:900")
            time.sleep(120)
        end(fault)
    time.sleep(script.get("ready_after_s", 0) * scale)
    engines = [Engine(model, options, script, start_number) for _ in range(options.get("data-parallel-size", 1))]
    engine = engines[0]
    if str(options.get("scheduler-cls", "")).endswith(".LiveScheduler"):
        control(engines, script)
    announce(engine, script)
    if node is not None:
        node.announce(engine)
    load_faults = Faults(script, "load")

    def on_request(number: int) -> bool:
        """True when the engine stalls from this request on."""
        for fault in load_faults.applying(engine.chunk):
            if number < fault.get("after_requests", 0):
                continue
            load_faults.play(fault, script)
            if fault.get("stall"):
                return True
            if fault.get("kill_core") and core is not None:
                os.kill(core, signal.SIGKILL)
                os.waitpid(core, 0)
                say(fault)
                return True
            end(fault)
        return False

    asyncio.run(run(Api(engines, script, on_request), options, bool(script.get("ignore_term")), node))


def control(engines: list[Engine], script: dict[str, Any]) -> None:
    """What `--scheduler-cls tuner.scheduler.LiveScheduler` does."""
    from fake_vllm_live import attach

    reason = max(attach(engine, script, number) for number, engine in enumerate(engines))
    if reason:
        print(f"tuner.scheduler.handles.LiveHandleError: {reason}")
        print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
        sys.exit(1)


async def run(api: Any, options: dict[str, Any], ignore_term: bool, node: Node | None) -> None:
    """Serve until TERM."""
    done = asyncio.Event()
    if not ignore_term:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    try:
        server = await asyncio.start_server(api.handle, options.get("host", "127.0.0.1"), options.get("port", 8000))
    except OSError as error:
        print(f"OSError: [Errno {error.errno}] Address already in use", flush=True)
        os._exit(1)
    print("INFO:     Application startup complete.", flush=True)
    await done.wait()
    server.close()
    print("INFO:     Shutting down", flush=True)
    if node is not None:
        node.end()
    os._exit(0)


def check_values(options: dict[str, Any]) -> None:
    """The refusals of vLLM's own configuration."""
    chunk, seqs = options.get("max-num-batched-tokens"), options.get("max-num-seqs")
    length = options.get("max-model-len", 8192)
    if chunk is not None and seqs is not None and chunk < seqs:
        refuse(f"max_num_batched_tokens ({chunk}) must be greater than or equal to max_num_seqs ({seqs}).")
    if chunk is not None and options.get("enable-chunked-prefill") is False and chunk < length:
        refuse(f"max_num_batched_tokens ({chunk}) is smaller than max_model_len ({length}).")


def refuse(message: str) -> None:
    """A validation error of pydantic."""
    print("pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig")
    print(f"  Value error, {message} [type=value_error, input_value=ArgsKwargs(()), input_type=ArgsKwargs]")
    sys.exit(1)


def announce(engine: Any, script: dict[str, Any]) -> None:
    """What vLLM says while it starts."""
    if engine.chunked:
        log(
            f"Chunked prefill is enabled with max_num_batched_tokens={engine.claimed_chunk}.",
            where="scheduler.py:307",
        )
    config = (
        f"model='{engine.model}', revision=None, max_seq_len={engine.max_model_len}, "
        f"tensor_parallel_size={engine.option('tensor-parallel-size', 1)}, "
        f"enable_prefix_caching={engine.prefix_caching}, enable_chunked_prefill={engine.chunked}"
    )
    version = script.get("version", "0.32.0")
    log(f"Initializing a V1 LLM engine (v{version}) with config: {config}", "EngineCore", "core.py:133")
    if "node" in script:
        return
    log("Model loading took 1.25 GiB memory and 0.5 seconds", "Worker", "gpu_model_runner.py:5150")
    log("Available KV cache memory: 4.0 GiB", "Worker", "gpu_worker.py:760")
    log(
        f"GPU KV cache size: {engine.kv_tokens:,} tokens, Maximum concurrency for {engine.max_model_len:,} tokens per "
        f"request: {engine.kv_tokens / engine.max_model_len:.2f}x",
        "EngineCore",
        "kv_cache_utils.py:2327",
    )


if __name__ == "__main__":
    main()
