"""Faults on demand, through the command: the right code, the right exit, nothing left behind.

One table. Each line is a script for the fake `vllm` with what has to become of the sweep.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FAKE = shlex.join([sys.executable, str(Path(__file__).parents[1] / "fakes" / "fake_vllm.py")])
"""By our own Python: a `python3` on PATH may be a shim that takes long."""
PROFILE = """
version: 1
name: faults
model: fake/model
engine: {args: {max_model_len: 2048, max_num_seqs: 16}, startup_timeout: 20s}
workload:
  kind: shared-prefix
  system_prompt_tokens: 128
  user_prompt_tokens: [8, 16]
  output_tokens: [3, 5]
  concurrency: 4
  requests: 20
  request_timeout: 3s
rounds: 1
space: {max_num_batched_tokens: [256, 512]}
references: [stock]
objective: {minimize: ttft_ms.p90}
budget: {trials: 2}
"""
STEADY = {"ttft_ms": 40, "token_ms": 4}
"""Slow enough that a busy test machine is no limit to the client."""
ATTEMPTS = 3
"""A round that a busy test machine could not drive in time is void, and says nothing about the fault."""
CHUNKED = {"with_option": "max-num-batched-tokens"}
"""A fault of candidates only: the untouched configuration names no chunk."""
LARGE = {**CHUNKED, "chunk_above": 400}


@dataclass(frozen=True)
class Fault:
    """What is played, and what is expected: exit code, and the cause and state of trials by number."""

    name: str
    script: dict[str, Any]
    exit_code: int
    trials: dict[int, tuple[str | None, str]] = field(default_factory=dict)
    launches: int | None = None
    """How many engines were started in all; None: not counted."""
    words: str = ""
    """In the message of the first failed trial or on stderr."""
    overrides: tuple[str, ...] = ()


def start(log: str, **more: Any) -> dict[str, Any]:
    return {"start": [{"log": log, "exit": 1, **more}]}


def load(**more: Any) -> dict[str, Any]:
    return {"load": [{"after_requests": 8, **more}]}


DONE = (None, "completed")
FAULTS = [
    Fault(
        "memory not back yet, once",
        start("no_free_memory", times=1),
        0,
        {0: ("no_free_memory", "engine_failed"), 1: DONE},
        words="11.42/79.11 GiB",
    ),
    Fault(
        "another tenant holds the memory",
        start("no_free_memory"),
        3,
        {0: ("no_free_memory", "engine_failed"), 1: ("no_free_memory", "engine_failed")},
        launches=2,
    ),
    Fault("port taken once", start("port_in_use", times=1), 0, {0: ("port_in_use", "engine_failed"), 1: DONE}),
    Fault(
        "KV cache too small for large chunks",
        start("kv_cache_too_small", **LARGE),
        0,
        {0: DONE, -512: ("kv_cache_too_small", "infeasible"), -256: DONE},
    ),
    Fault(
        "out of memory at the start of large chunks",
        start("cuda_oom_at_start", **LARGE),
        0,
        {-512: ("cuda_oom", "infeasible"), -256: DONE},
    ),
    Fault(
        "out of memory under the load of large chunks",
        load(log="cuda_oom_under_load", exit=1, **LARGE),
        0,
        {-512: ("cuda_oom", "infeasible"), -256: DONE},
        words="under load",
    ),
    Fault(
        "a block size that no backend takes",
        {"block_multiple": 16},
        3,
        {0: ("block_size", "infeasible")},
        overrides=("engine.args.block_size=8",),
        words="MultipleOf(16)",
    ),
    Fault(
        "a chunk below max_num_seqs is refused before launch",
        {},
        0,
        {0: DONE, -256: ("invalid_combination", "infeasible"), -512: DONE},
        overrides=("engine.args.max_num_seqs=300",),
        words="max_num_seqs (300)",
    ),
    Fault(
        "a hybrid model's bound is learnt from one refusal",
        start("hybrid_block_size", **CHUNKED, chunk_below=2096),
        0,
        {0: DONE, -4096: DONE},
        overrides=("space.max_num_batched_tokens=[256, 512, 1024, 4096]", "budget.trials=4"),
    ),
    Fault("gated model", start("gated_model"), 3, {0: ("gated_model", "engine_failed")}, 1, "gated"),
    Fault("missing model", start("missing_model"), 2, {0: ("missing_model", "engine_failed")}, 1, "no/such-model"),
    Fault("missing tokenizer", start("missing_tokenizer"), 3, {0: ("missing_tokenizer", "engine_failed")}, 1),
    Fault("unsupported GPU", start("unsupported_gpu_dtype"), 3, {0: ("unsupported_gpu", "engine_failed")}, 1),
    Fault(
        "an option that this version does not have",
        {"unknown_options": ["max-num-seqs"]},
        2,
        {},
        launches=0,
        words="--max-num-seqs",
    ),
    Fault(
        "an option that only the start refuses",
        {"unknown_options": ["max-num-seqs"], "help_fails": True},
        2,
        {0: ("unknown_option", "engine_failed")},
        launches=1,
    ),
    Fault(
        "never ready",
        {"start": [{"hang": True}], "core": "polite"},
        3,
        {0: ("startup_timeout", "engine_failed"), 1: ("startup_timeout", "engine_failed")},
        2,
        "not ready after 4 s",
        ("engine.startup_timeout=4s",),
    ),
    Fault(
        "the reason stands 300 lines above",
        start("reason_300_lines_above", **LARGE),
        0,
        {-512: ("block_size", "infeasible"), -256: DONE},
        words="FLASHMLA",
    ),
    Fault(
        "exits 0 in mid-round",
        load(exit=0),
        3,
        {0: ("engine_died", "engine_failed"), 1: ("engine_died", "engine_failed")},
        launches=2,
        words="exit code 0",
    ),
    Fault(
        "the engine process dies behind a healthy API server",
        {**load(kill_core=True), "core": "stubborn"},
        3,
        {0: ("engine_died", "engine_failed"), 1: ("engine_died", "engine_failed")},
        launches=2,
    ),
    Fault(
        "stops emitting tokens, its health check stays fine",
        load(stall=True),
        3,
        {0: ("engine_stalled", "engine_failed"), 1: ("engine_stalled", "engine_failed")},
        launches=2,
        overrides=("workload.request_timeout=3m",),
    ),
    Fault(
        "always fails, for a reason that nobody knows",
        start("survived_warning_then_unknown"),
        3,
        {0: ("unknown", "engine_failed")},
        launches=2,
        words="the flange of rank 2 is bent",
    ),
    Fault(
        "runs another chunk than the one asked for",
        {"log_chunk": 2048},
        4,
        {0: DONE, 1: ("not_as_asked", "infeasible"), 2: ("not_as_asked", "infeasible")},
        words="asked for was",
    ),
    Fault("wants an API key", {"api_key": "k"}, 3, {0: ("auth", "engine_failed")}, 1, "401"),
    Fault("every request is a 500", {"http_error_share": 1.0}, 3, {0: ("http_error", "load_failed")}),
    Fault("60 % of the replies are empty", {"empty_share": 0.6}, 3, {0: ("too_many_failures", "load_failed")}),
    Fault(
        "leaves stubborn workers behind",
        {**start("gated_model", after_s=0.3), "core": "stubborn"},
        3,
        {0: ("gated_model", "engine_failed")},
        launches=1,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_fault(fault: Fault, tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        done, trials = play(fault, folder)
        if not any(t["cause"] == "client_limited" for t in trials):
            break
    said = done.stderr + "".join(t["message"] or "" for t in trials)
    assert done.returncode == fault.exit_code, said
    assert "Traceback" not in done.stderr
    for key, (cause, state) in fault.trials.items():
        trial = trials[key] if key >= 0 else candidate_with(trials, -key)
        assert (trial["cause"], trial["state"]) == (cause, state), trial["message"]
        # What the rounds found out carries no hint of its own.
        assert trial["hint"] or state in ("completed", "load_failed") or cause == "engine_stalled"
    assert fault.words in said
    if fault.exit_code == 0:
        number, total = re.findall(r"^\[(\d+)/(\d+)\] ", done.stderr, re.MULTILINE)[-1]
        assert number == total == str(len(trials)), "repeated and refused trials are counted too"
    if fault.launches is not None:
        counted = folder / "state" / "starts"
        assert (counted.stat().st_size if counted.exists() else 0) == fault.launches


def play(fault: Fault, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The sweep with this fault, which leaves no process, whatever became of it."""
    folder.mkdir()
    profile = folder / "faults.yaml"
    profile.write_text(PROFILE)
    script = {"state": str(folder / "state"), **STEADY, **fault.script}
    command = [sys.executable, "-m", "tuner", "sweep", str(profile), "--vllm", FAKE, "--out", str(folder)]
    command += [word for given in fault.overrides for word in ("--set", given)]
    env = {**os.environ, "FAKE_VLLM": json.dumps(script), "CHUNKTUNE_TEST_MARK": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert alive(folder) == []
    return done, read_trials(folder / "faults")


def read_trials(study: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(study.glob("trials/*/trial.json"))]


def candidate_with(trials: list[dict[str, Any]], chunk: int) -> dict[str, Any]:
    knob = {"max_num_batched_tokens": chunk}
    return next(t for t in trials if t["role"] == "candidate" and t["knobs"] == knob)


def alive(mark: Path) -> list[int]:
    """Pids of living processes whose environment names this folder."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes() if entry.isdigit() else b""
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0] if environ else "X"
        except OSError:
            continue
        if f"CHUNKTUNE_TEST_MARK={mark}\0".encode() in environ and state not in "ZX":
            found.append(int(entry))
    return found
