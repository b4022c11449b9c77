"""The main job on the real `vllm serve` with a GPU's timing: a sweep, its frozen file served, measured and rerun.

The timing is that of `benchmarks/paced`: its steps wait in place of computing, so that a busy machine changes little,
and a small chunk is clearly slower than a large one.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine.serving import started
from tuner.domain.experiment import STOCK_ID, Round, Start, StudySummary
from tuner.domain.frozen import Frozen
from tuner.domain.workload import SharedPrefixWorkload
from tuner.engine.effective import difference, from_log
from tuner.experiment.store import StudyRecord, read_study
from tuner.freeze import load_frozen
from tuner.load.drive import drive
from tuner.load.planner import Planner
from tuner.load.probe import probe
from tuner.load.target import Target
from tuner.telemetry import metrics_span

ROOT = Path(__file__).resolve().parents[2]
STOCK_CHUNK = 128
CHUNKS = (256, 512, 1024)
TOO_SMALL = 32
"""Below max_num_seqs: refused before any start."""
START_S = 300.0


def paced(vllm: str, scale: float) -> str:
    """The command of a vLLM whose steps take `scale` times as long as on four H100."""
    words = [sys.executable, str(ROOT / "benchmarks" / "paced" / "serve.py"), "--vllm", vllm]
    words += ["--cost-model", "meta-llama/Meta-Llama-3.1-70B", "--count", "4", "--step-time-scale", str(scale)]
    return shlex.join(words)


def chunktune(*words: object, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuner", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def folder(vllm_command: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one study of profiles/cpu-tiny.yaml, whose stock has a chunk that is too small for its load."""
    path = tmp_path_factory.mktemp("sweep")
    changes = [
        f"engine.args.max_num_batched_tokens={STOCK_CHUNK}",
        "engine.args.max_num_seqs=64",
        f"space.max_num_batched_tokens={[TOO_SMALL, *CHUNKS]}",
        "budget.time=3m",
    ]
    options = [word for change in changes for word in ("--set", change)]
    command = ["sweep", "cpu-tiny", "--vllm", paced(vllm_command, 3), "--json", *options]
    done = chunktune(*command, cwd=path, timeout_s=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "cannot be switched" not in done.stderr
    (path / "sweep.json").write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def study(folder: Path) -> StudyRecord:
    return read_study(folder / "results" / "cpu-tiny")


@pytest.fixture(scope="module")
def summary(study: StudyRecord) -> StudySummary:
    assert study.summary is not None
    return study.summary


@pytest.fixture(scope="module")
def frozen(study: StudyRecord) -> Frozen:
    return load_frozen(study.directory / "frozen.json")


def completed(study: StudyRecord, purpose: str) -> list[Start]:
    return [s for s in study.results.starts if s.purpose == purpose and s.state == "completed"]


def kept(study: StudyRecord, start: Start) -> Iterator[list[Round]]:
    """The kept rounds of a start by cycle."""
    rounds = study.results.kept(starts=[start.number])
    for cycle in sorted({r.cycle for r in rounds}):
        yield [r for r in rounds if r.cycle == cycle]


def test_one_start_measures_every_chunk_and_stock(study: StudyRecord) -> None:
    (search,) = completed(study, "search")
    assert search.live
    assert "tuner.scheduler.LiveScheduler" in search.command
    # Booted with the largest chunk under test.
    assert search.effective_args is not None
    assert search.effective_args["max_num_batched_tokens"] == max(CHUNKS)
    chunks = {name: search.defined[str(name)].chunk or STOCK_CHUNK for name in search.settings}
    assert sorted(chunks.values()) == [STOCK_CHUNK, *CHUNKS]
    first = next(kept(study, search))
    assert {r.setting for r in first} == set(chunks)
    assert {r.measurement.requests for r in first} == {12}
    # The scheduler's own counts: with the same lengths, a larger chunk takes fewer steps for a prompt.
    steps = [r.measurement.prefill_chunks_per_request or 0 for r in sorted(first, key=lambda r: chunks[r.setting])]
    assert all(more > fewer >= 1 for more, fewer in pairwise(steps)), steps
    assert not [r.reason for r in study.results.rounds if r.code == "not_as_applied"]


def test_the_finals_repeat_the_best_beside_stock_on_fresh_starts(study: StudyRecord, summary: StudySummary) -> None:
    finals = completed(study, "final")
    assert len(finals) == 3
    for start in finals:
        assert start.live
        assert {STOCK_ID, summary.winner} <= set(start.settings)
        assert any({STOCK_ID, summary.winner} <= {r.setting for r in cycle} for cycle in kept(study, start))
    (literal,) = completed(study, "literal")
    assert not literal.live
    assert literal.settings == [summary.winner]
    assert "--scheduler-cls" not in literal.command
    assert list(kept(study, literal))


def test_the_summary_says_by_how_much_the_winner_is_better(
    folder: Path, study: StudyRecord, summary: StudySummary
) -> None:
    assert StudySummary.model_validate_json((folder / "sweep.json").read_text()) == summary
    assert summary.verdict == "better"
    assert not summary.simulated
    by_id = {line.id: line for line in summary.settings}
    (refused,) = [line for line in by_id.values() if line.state == "infeasible"]
    assert refused.knobs["max_num_batched_tokens"] == TOO_SMALL
    assert {by_id[n].state for n in completed(study, "search")[0].settings} <= {"measured", "eliminated"}
    (best,) = [line for line in summary.finals if line.id == summary.winner]
    change = best.vs_stock["ttft_ms.p90"]
    assert change.change < -0.2
    assert change.ci95 is not None
    assert change.ci95[1] < 0
    assert best.median is not None
    assert best.median.memory.source == "host"
    assert best.median.memory.peak_bytes["host"] > 100e6
    (row,) = [row for row in summary.table if row.winner]
    assert row.max_num_batched_tokens == best.knobs["max_num_batched_tokens"]
    assert summary.time.starts == len(study.results.starts)


def test_the_frozen_command_serves_the_winner_and_bench_sees_what_the_server_sees(
    study: StudyRecord, frozen: Frozen, summary: StudySummary, tmp_path: Path
) -> None:
    assert frozen.verdict == "better"
    assert frozen.setting == summary.winner
    assert frozen.stock is not None
    assert frozen.stock.engine_args["max_num_batched_tokens"] == STOCK_CHUNK
    assert (frozen.fingerprint.vllm_version or "").startswith("0.32")
    line = chunktune("freeze", study.directory, "--format", "args", cwd=tmp_path).stdout.strip().splitlines()[-1]
    assert shlex.split(line)[-len(frozen.command) :] == frozen.command
    assert not {"--scheduler-cls", "--served-model-name", "--host", "--port"} & set(frozen.command)
    with started(frozen.command, frozen.engine_env, tmp_path / "serve.log", START_S) as server:
        runs = from_log(server.log.read_text(errors="replace").splitlines()).args
        assert runs["max_num_batched_tokens"] in CHUNKS
        assert difference(frozen.engine_args, runs) is None
        base_url = f"http://127.0.0.1:{server.port}"
        _the_server_counts_the_same_ttft(base_url)
        _bench_measures_it(base_url, tmp_path)


def _the_server_counts_the_same_ttft(base_url: str) -> None:
    """Mean TTFT over the same requests as `vllm:time_to_first_token_seconds` saw, within 5 ms or 5 %."""
    # A busy moment only ever adds to what we see; one round without one shows what the client itself adds.
    pairs = []
    for attempt in range(5):
        ours, theirs = asyncio.run(_both_means(base_url, f"agreement-{attempt}"))
        if abs(ours - theirs) <= max(5.0, 0.05 * theirs):
            return
        pairs.append((ours, theirs))
    pytest.fail(f"(ours, theirs), ms: {pairs}")


async def _both_means(base_url: str, key: str) -> tuple[float, float]:
    # One request at a time: of several, the server's own time leaves out how long they wait to be read.
    workload = SharedPrefixWorkload(
        system_prompt_tokens=(256, 256),
        user_prompt_tokens=(16, 48),
        output_tokens=(2, 4),
        concurrency=1,
        requests=20,
    )
    target = Target(base_url)
    planner = await Planner.open(target, workload, await probe(target), seed=11, base_dir=Path())
    await drive(target, planner.warm_up("w"))
    async with metrics_span(target.base) as span:
        observation = await drive(target, planner.plan(key, key))
    ours = [r.ttft_ms for r in observation.records if r.ttft_ms is not None]
    assert span.delta.server_ttft_mean_ms is not None
    return sum(ours) / len(ours), span.delta.server_ttft_mean_ms


def _bench_measures_it(base_url: str, tmp_path: Path) -> None:
    done = chunktune("bench", "cpu-tiny", "--url", base_url, "--json", "--rounds", 1, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["schema"], document["purpose"]) == ("chunktune.start/1", "bench")
    assert document["rounds"][-1]["state"] == "kept"
    assert document["median"]["ttft_ms"]["n"] == 12
    assert document["median"]["failed_requests"] == 0


def regress(study: StudyRecord, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One start of what was frozen, judged with a tolerance that a busy machine stays within."""
    options = ["--starts", 1, "--stages", 1, "--tolerance", 30, "--json", *words]
    return chunktune("regress", study.directory / "frozen.json", *options, cwd=tmp_path, timeout_s=600)


def test_the_same_engine_is_ok_when_it_runs_again(study: StudyRecord, tmp_path: Path) -> None:
    done = regress(study, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] in ("ok", "improved")
    assert len(list((tmp_path / "results" / "runs").glob("*/starts/*/start.json"))) == 1


def test_an_engine_that_is_twice_as_slow_has_regressed(study: StudyRecord, vllm_command: str, tmp_path: Path) -> None:
    done = regress(study, tmp_path, "--vllm", paced(vllm_command, 6))
    assert done.returncode == 10, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"] == "regressed"
