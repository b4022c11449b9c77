"""The main job on the real `vllm serve`: four chunk sizes, three rounds each, and a frozen file that starts it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tuner.engine.effective import difference, from_log
from tuner.engine.launch import free_port
from tuner.load.drive import drive
from tuner.load.planner import Planner
from tuner.load.probe import probe
from tuner.load.target import Target
from tuner.profile import load_profile
from tuner.telemetry import metrics_span

CHUNKS = {64, 128, 256, 512}
ENGINE_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def chunktune(*arguments: object, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def study(vllm_command: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One sweep of profiles/cpu-tiny.yaml."""
    folder = tmp_path_factory.mktemp("sweep")
    done = chunktune(
        "sweep", "cpu-tiny", "--engine", "vllm", "--vllm", vllm_command, "--json", cwd=folder, timeout_s=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "results/cpu-tiny"


def trials(study: Path) -> list[dict[str, Any]]:
    return [json.loads(f.read_text()) for f in sorted(study.glob("trials/*/trial.json"))]


@contextmanager
def serving(command: list[str], port: int, tmp_path: Path, **env: str) -> Iterator[str]:
    """The server of `command` until the block ends; its log is in `tmp_path`."""
    with (tmp_path / "serve.log").open("wb") as log:
        child = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **ENGINE_ENV, **env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while not _healthy(base_url):
            text = (tmp_path / "serve.log").read_text(errors="replace")
            assert child.poll() is None, text[-3000:]
            assert time.monotonic() < deadline, text[-3000:]
            time.sleep(0.5)
        yield base_url
    finally:
        family = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
        for process in family:
            if process.is_running():
                process.kill()


def _healthy(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_every_chunk_size_is_measured_three_times(study: Path) -> None:
    found = [t for t in trials(study) if t["role"] == "candidate" and t["state"] == "completed"]
    assert {t["knobs"]["max_num_batched_tokens"] for t in found} == CHUNKS
    for trial in found:
        counting = [r for r in trial["rounds"] if r["void"] is None]
        assert len(counting) == 3
        assert trial["effective_args"]["max_num_batched_tokens"] == trial["knobs"]["max_num_batched_tokens"]
        assert trial["median"]["ttft_ms"]["n"] == 40
        assert trial["median"]["failed_requests"] == 0
        assert 0.8 < trial["median"]["prefix_hit_rate"] < 1
        assert trial["median"]["engine_steps"] > 0
        assert trial["median"]["memory"]["source"] == "host"
        assert trial["median"]["memory"]["peak_bytes"]["host"] > 100e6


def test_the_winner_is_frozen_and_its_command_starts_that_server(study: Path, tmp_path: Path) -> None:
    done = chunktune("freeze", study, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    frozen = json.loads(done.stdout)
    assert frozen["simulated"] is False
    assert frozen["fingerprint"]["vllm_version"].startswith("0.32")
    line = chunktune("freeze", study, "--format", "args", cwd=tmp_path).stdout.strip().splitlines()[-1]
    assert shlex.split(line)[-len(frozen["command"]) :] == frozen["command"]
    port = free_port()
    with serving(frozen["command"], port, tmp_path) as base_url:
        _runs_as_frozen(tmp_path / "serve.log", frozen)
        _bench_agrees_with_the_servers_own_ttft(base_url, tmp_path)


def test_vllm_accepts_the_yaml_and_runs_it(study: Path, vllm_command: str, tmp_path: Path) -> None:
    path = tmp_path / "frozen.yaml"
    assert chunktune("freeze", study, "--format", "yaml", "-o", path, cwd=tmp_path).returncode == 0
    assert isinstance(yaml.safe_load(path.read_text()), dict)
    frozen = json.loads((study / "frozen.json").read_text())
    with serving([vllm_command, "serve", "--config", str(path)], free_port(), tmp_path):
        _runs_as_frozen(tmp_path / "serve.log", frozen)


def _runs_as_frozen(log: Path, frozen: dict[str, Any]) -> None:
    """What the server says of itself is what was frozen."""
    runs = from_log(log.read_text(errors="replace").splitlines()).args
    assert runs["max_num_batched_tokens"] == frozen["engine_args"]["max_num_batched_tokens"]
    assert difference(frozen["engine_args"], runs) is None


def _bench_agrees_with_the_servers_own_ttft(base_url: str, tmp_path: Path) -> None:
    """Mean TTFT over the same requests as `vllm:time_to_first_token_seconds` saw, within 5 ms or 5 %."""
    # A busy moment only ever adds to what we see; one round without one shows what the client itself adds.
    pairs = [asyncio.run(_both_means(base_url, f"agreement-{n}")) for n in range(3)]
    assert any(abs(ours - theirs) <= max(5.0, 0.05 * theirs) for ours, theirs in pairs), f"(ours, theirs), ms: {pairs}"
    done = chunktune("bench", "cpu-tiny", "--url", base_url, "--json", "--rounds", 1, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["median"]["ttft_ms"]["n"] == 40


async def _both_means(base_url: str, key: str) -> tuple[float, float]:
    target = Target(base_url)
    workload = load_profile("cpu-tiny").workload
    facts = await probe(target)
    planner = await Planner.open(target, workload, facts, seed=11, base_dir=Path())
    await drive(target, planner.warm_up("w"))
    async with metrics_span(target.base) as span:
        observation = await drive(target, planner.plan(key, key))
    ours = [r.ttft_ms for r in observation.records if r.ttft_ms is not None]
    assert span.delta.server_ttft_mean_ms is not None
    return sum(ours) / len(ours), span.delta.server_ttft_mean_ms


def test_the_frozen_study_is_ok_when_it_runs_again(study: Path, tmp_path: Path) -> None:
    """The loop of freeze and regress; the tolerance is wide because a shared machine is no ruler."""
    frozen = study / "frozen.json"
    done = chunktune(
        "regress", frozen, "--starts", 1, "--tolerance", 60, "--control", "never", "--json", cwd=tmp_path, timeout_s=900
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    assert json.loads(done.stdout)["verdict"] in ("ok", "improved")
